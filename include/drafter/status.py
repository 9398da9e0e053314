"""What runs, what ran and what is stored, read from files: one answer for sensors and people.

Standard library only; writes nothing and takes no lock, so it can be asked at any time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafter.errors import MEANING, DataError
from drafter.files import count_lines, file_record, read_json
from drafter.jobs import job_dirs, live
from drafter.layout import JobDir, Prepared, Workspace
from drafter.terminal import duration, one_line, table

SHOWN = ("counts", "stop_reason", "token_budget", "files")
"""Keys of a manifest section that travel."""

VERIFIED = ("generate", "validate")
"""Sections whose files are looked at."""

SECTIONS = ("prepare", "generate", "validate", "extract")
"""Of a dataset's manifests, in the order in which they come to be."""

TOLD = ("what", "start_id", "run_id", "pilot_rows")
"""Keys of job.json that travel."""

COLUMNS = (
    "dataset", "state", "prompts", "responses", "tokens", "tokens/s", "in flight", "ETA", "failed",
    "stop reason",
)  # fmt: skip


def read_status(
    workspace_root: Path, verify: bool = False, dataset: str | None = None
) -> dict[str, Any]:
    """{jobs: {phase: {dataset: ...}}, datasets: {name: {section: ...}}}.

    A job is {alive, state, exit, progress, job: {what, start_id, run_id, pilot_rows}}, null where
    there is none; a dataset holds the SHOWN part of its sections generate, validate, extract, ...
    (with ``imported``, the other system, where its states come from one), and ``sizes``: {file:
    bytes now} of what generate and validate left. Without a section generate it has ``stored``:
    {responses: lines now}, unless the job is alive. With ``verify`` it also holds ``verified``:
    {file: "ok" | "missing" | "changed: ..."}, each file that generate and validate left and that
    validate read, compared with the file as it is now by size and then by hash; dates count for
    nothing. A changed one says which phase saw what, and what is there now.
    ``dataset`` asks about one only.
    """
    workspace = Workspace(Path(workspace_root))
    jobs: dict[str, dict[str, dict[str, Any]]] = {}
    for path in job_dirs(workspace.root, dataset):
        jobs.setdefault(path.parent.name, {})[path.name] = _job(JobDir(path))
    generating = {name for name, job in jobs.get("generate", {}).items() if job["alive"]}
    return {
        "jobs": jobs,
        "datasets": {
            name: _dataset(workspace, name, verify, name in generating)
            for name in _names(workspace)
            if dataset in (None, name)
        },
    }


def as_table(status: dict[str, Any]) -> str:
    """:func:`read_status` for people: a line per dataset, "all" for jobs over every dataset; below
    it the files that were verified and are not as their phases left them."""
    by_dataset: dict[str, dict[str, Any]] = {name: {} for name in status["datasets"]}
    for phase, jobs in status["jobs"].items():
        for name, job in jobs.items():
            by_dataset.setdefault(name, {})[phase] = job
    lines = table(
        COLUMNS,
        (
            _line(name, by_dataset[name], status["datasets"].get(name, {}))
            for name in sorted(by_dataset)
        ),
    )
    verified = {
        f"{name}/{file}": verdict
        for name, sections in status["datasets"].items()
        for file, verdict in sections.get("verified", {}).items()
    }
    if not verified:
        return lines
    spoilt = [f"{file}: {verdict}" for file, verdict in verified.items() if verdict != "ok"]
    return "\n".join([lines, *(spoilt or [f"{len(verified)} files as their phases left them"])])


def _line(name: str, jobs: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    section = sections.get("generate", {})
    generate = jobs.get("generate") or {}
    # What a job reports is newer than what the last one that finished left. Once it has ended
    # without leaving a section, or the section has gone, answers may have been moved away since.
    told = generate.get("alive") or "generate" in sections
    progress = (generate.get("progress") if told else None) or {}
    numbers = {**sections.get("stored", {}), **section, **section.get("counts", {}), **progress}
    tokens, budget = numbers.get("completion_tokens"), numbers.get("token_budget")
    of = "" if tokens is None or budget is None else f" of {budget:,}"
    running = progress if generate.get("alive") else {}
    failed = numbers.get("failed")
    prepared = sections.get("prepare", {}).get("counts", {}).get("prompts")
    eta_s = running.get("eta_s")
    return [
        one_line(name),
        _state(jobs, sections),
        _number(numbers.get("prompts", prepared)),
        _number(numbers.get("responses")),
        _number(tokens) + of,
        _number(running.get("tokens_per_s")),
        _number(running.get("in_flight")),
        "" if eta_s is None else duration(eta_s),
        _number(sum(failed.values()) if failed else None),
        "" if running else str(numbers.get("stop_reason", "")),
    ]


def _state(jobs: dict[str, Any], sections: dict[str, Any]) -> str:
    """The jobs that run, both sides of a spool for one; else the last one that ended; else the last
    phase that is done."""
    alive = [
        f"{_name(phase, job)} {(job['state'] or {}).get('state', 'starting')}"
        for phase, job in jobs.items()
        if job["alive"]
    ]
    if alive:
        return ", ".join(alive)
    ended = {
        phase: job["exit"]
        for phase, job in jobs.items()
        if job["exit"] and not _undone(phase, job, sections)
    }
    if ended:
        phase = max(ended, key=lambda phase: ended[phase].get("ended", 0))
        code = ended[phase].get("code")
        said = MEANING.get(code, "failed unexpectedly")
        return f"{_name(phase, jobs[phase])} {said}" + (f" ({code})" if code else "")
    if system := sections.get("extract", {}).get("imported"):
        return f"imported from {system}"
    done = [section for section in SECTIONS if section in sections]
    return f"{done[-1]} done" if done else ""


def _undone(phase: str, job: dict[str, Any], sections: dict[str, Any]) -> bool:
    """Did the job succeed, and what it made was moved away since?"""
    if job["exit"].get("code") != 0 or not sections:
        return False
    if is_pilot(job):
        return not sections.get("stored", {}).get("responses")
    return phase in SECTIONS and phase not in sections


def is_pilot(job: dict[str, Any]) -> bool:
    """Of generate: was it to stop at a few rows?"""
    return bool((job["job"] or {}).get("pilot_rows"))


def _name(phase: str, job: dict[str, Any]) -> str:
    return "pilot" if is_pilot(job) else phase


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _names(workspace: Workspace) -> list[str]:
    places = (workspace.prepared("-").root.parent, workspace.hidden_states("-").root.parent)
    return sorted({path.parent.name for place in places for path in place.glob("*/manifest.json")})


def _job(job: JobDir) -> dict[str, Any]:
    spec, state, end, progress = map(_record, (job.job, job.state, job.exit, job.progress))
    start_id = spec and spec.get("start_id")

    def own(record: dict[str, Any] | None) -> dict[str, Any] | None:
        return record if record and record.get("start_id") == start_id else None

    return {
        "alive": live(job) is not None,
        "state": own(state),
        "exit": own(end),
        "progress": own(progress),
        "job": spec and {key: spec.get(key) for key in TOLD},
    }


def _dataset(workspace: Workspace, name: str, verify: bool, generating: bool) -> dict[str, Any]:
    prepared = workspace.prepared(name)
    sections: dict[str, Any] = {}
    for manifest in (prepared.manifest, workspace.hidden_states(name).manifest):
        sections |= _read(manifest) or {}
    shown: dict[str, Any] = {
        section: {key: value[key] for key in SHOWN if key in value}
        for section, value in sections.items()
    }
    if system := sections.get("extract", {}).get("inputs", {}).get("imported"):
        shown["extract"]["imported"] = system
    records = _records(prepared, sections)
    shown["sizes"] = {path.name: path.stat().st_size for path in records if path.exists()}
    if "generate" not in sections and not generating and prepared.responses.exists():
        shown["stored"] = {"responses": count_lines(prepared.responses)}
    if verify:
        shown["verified"] = {path.name: _compare(path, known) for path, known in records.items()}
    return shown


def _records(
    prepared: Prepared, sections: dict[str, dict[str, Any]]
) -> dict[Path, list[tuple[str, dict[str, Any]]]]:
    """Every file that generate and validate left or validate read, as each of them saw it:
    (what the phase did, {bytes, sha256})."""
    records: dict[Path, list[tuple[str, dict[str, Any]]]] = {}
    for section in VERIFIED:
        for file, record in sections.get(section, {}).get("files", {}).items():
            records.setdefault(prepared.root / file, []).append((f"{section} left", record))
    read = sections.get("validate", {}).get("inputs", {})
    for name, path in (("responses", prepared.responses), ("prompt_ids", prepared.prompt_ids)):
        if name in read:
            records.setdefault(path, []).append(("validate read", read[name]))
    return records


def _compare(path: Path, records: list[tuple[str, dict[str, Any]]]) -> str:
    if not path.exists():
        return "missing"
    size = path.stat().st_size
    for saw, record in records:
        if record["bytes"] != size:
            return f"changed: {saw} {record['bytes']:,} bytes, now {size:,}"
    now = file_record(path)
    for saw, record in records:
        if record != now:
            return f"changed: {saw} sha256 {record['sha256'][:12]}, now {now['sha256'][:12]}"
    return "ok"


def _record(path: Path) -> dict[str, Any] | None:
    """A job's record; an unreadable one tells as little as none."""
    try:
        return read_json(path)
    except DataError:
        return None


def _read(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None
