"""Where everything lives on the GPU host, and how it is written. The only module that spells paths.

    <workspace>/
      code/<sha256>/drafter/       deployed copies of this package (see gpu_host.deploy)
      recipe.json  bin/drafter     resolved recipe and launcher of the newest code
      prepared/<dataset>/
        .lock                      flock: one writer per dataset (supervisor, CLI, restart)
        prompts.jsonl              sample_id, messages, tools, source {id, row, revision}
        prompt_ids.jsonl           derived: sample_id, input_ids; retired: true where it is
        raw_responses.jsonl        append-only: sample_id, output_ids, prompt_tokens,
                                   completion_tokens, finish_reason ("stop" | "length")
        failed.jsonl               requests without a storable row: sample_id, class, reason;
                                   final: false where the engine itself is in doubt
        sessions.jsonl             one line per job start, then (offset, time) marks
        rejected.jsonl             sample_id, reason: rows that validate did not accept
        tokenized_data.jsonl       sample_id, input_ids (prompt then output), prompt_tokens
        manifest.json              sections prepare, pilot (see drafter.approval), generate,
                                   validate
        *.torn                     last lines that a kill tore, set aside before the next append
        *.damaged                  lines that `drafter repair` set aside
        .rewrite/                  whole new files about to take their places: see drafter.rewrite
        archive/<run id>/          what restart and the canary (canary-N.jsonl) moved away;
                                   rejected-<run id>: a pilot that a person rejected;
                                   discard-<time> and restart-<time> by hand;
                                   <name>.partial while it is being filled
      hidden_states/<dataset>/     shard-00000.safetensors ...  manifest.json (section extract)
      drafter/<run>/               step-000500/  metrics.jsonl  evaluation/<dataset>.json
                                   evaluation/<dataset>.greedy.jsonl: the target's greedy answers
                                   no_states/: the same drafter trained without states
                                   export/{sglang,vllm}/  manifest.json (sections train, export)
      jobs/<phase>/<dataset>/      job.json state.json progress.json log exit lease
                                   stop stopped .start .exit.reserved: see JobDir
                                   (dataset "all", with a .lock, for prepare, train and export)

A manifest is a JSON object of sections; each phase replaces its own section and no other, under the
dataset's lock. A section holds ``identity`` (what must not change under the data), ``counts`` and
``files`` ({name: {bytes, sha256}} as the phase left them). Files appear whole (temporary name,
fsync, rename), except raw_responses.jsonl, failed.jsonl, sessions.jsonl, metrics.jsonl,
*.greedy.jsonl and log, which only grow. What a killed writer left under a temporary name
(``.<name>.<pid>.partial``) the next phase that writes there removes.

Standard library only: the status command and the supervisor use it with any python3.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.errors import Busy, DataError

ALL = "all"
"""The dataset name of jobs that span every dataset."""

_GREEDY = ".greedy.jsonl"


@dataclass(frozen=True)
class Prepared:
    """``prepared/<dataset>``: prompts, responses and what was made of them."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts.jsonl"

    @property
    def prompt_ids(self) -> Path:
        return self.root / "prompt_ids.jsonl"

    @property
    def responses(self) -> Path:
        return self.root / "raw_responses.jsonl"

    @property
    def failed(self) -> Path:
        return self.root / "failed.jsonl"

    @property
    def sessions(self) -> Path:
        return self.root / "sessions.jsonl"

    @property
    def rejected(self) -> Path:
        return self.root / "rejected.jsonl"

    @property
    def tokenized(self) -> Path:
        return self.root / "tokenized_data.jsonl"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def rewrite(self) -> Path:
        return self.root / ".rewrite"

    def archive(self, run_id: str) -> Path:
        return self.root / "archive" / slug(run_id)


@dataclass(frozen=True)
class HiddenStates:
    """``hidden_states/<dataset>``: shards and their manifest."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    def shard(self, index: int) -> Path:
        return self.root / f"shard-{index:05d}.safetensors"


@dataclass(frozen=True)
class DrafterRun:
    """``drafter/<run>``: one training run, its evaluation and its exports."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def evaluation(self, dataset: str) -> Path:
        return self.root / "evaluation" / f"{dataset}.json"

    def greedy(self, dataset: str) -> Path:
        """Greedy answers of the target to held-out prompts, kept so that none is paid for twice."""
        return self.root / "evaluation" / f"{dataset}{_GREEDY}"

    def export(self, engine: str) -> Path:
        return self.root / "export" / engine


@dataclass(frozen=True)
class JobDir:
    """``jobs/<phase>/<dataset>``: one phase on one dataset, whatever Airflow calls the try."""

    root: Path

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def progress(self) -> Path:
        return self.root / "progress.json"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def exit(self) -> Path:
        return self.root / "exit"

    @property
    def reserved_exit(self) -> Path:
        """Becomes ``exit``: its bytes are taken at the start, so that a full disk cannot."""
        return self.root / ".exit.reserved"

    @property
    def lease(self) -> Path:
        return self.root / "lease"

    @property
    def stop(self) -> Path:
        """{start_id, request}: that start is to end."""
        return self.root / "stop"

    @property
    def stopped(self) -> Path:
        """{request}: the last asker that was stopped; a later start by it is refused."""
        return self.root / "stopped"

    @property
    def starting(self) -> Path:
        """flock: one start or stop at a time."""
        return self.root / ".start"


@dataclass(frozen=True)
class Workspace:
    """The root of one deployment's state. Another target or revision is another workspace."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.json"

    @property
    def launcher(self) -> Path:
        return self.root / "bin" / "drafter"

    def code(self, sha256: str) -> Path:
        return self.root / "code" / sha256

    def prepared(self, dataset: str) -> Prepared:
        return Prepared(self.root / "prepared" / dataset)

    def hidden_states(self, dataset: str) -> HiddenStates:
        return HiddenStates(self.root / "hidden_states" / dataset)

    def drafter(self, run: str) -> DrafterRun:
        return DrafterRun(self.root / "drafter" / run)

    def drafters(self) -> list[DrafterRun]:
        return [DrafterRun(root) for root in sorted((self.root / "drafter").glob("*"))]

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def job(self, phase: str, dataset: str) -> JobDir:
        return JobDir(self.jobs / phase / dataset)

    def lock(self, phase: str, dataset: str) -> Path:
        """The lock a job holds: the dataset's, or the phase's own for jobs over all datasets."""
        return (
            self.job(phase, ALL).root / ".lock" if dataset == ALL else self.prepared(dataset).lock
        )


def repaired_as(path: Path) -> str | None:
    """The dataset whose ``drafter repair`` looks at ``path``; None for what a phase writes anew."""
    prepared = Prepared(path.parent)
    if path in (prepared.prompts, prepared.responses, prepared.failed, prepared.sessions):
        return path.parent.name
    if path.name.endswith(_GREEDY):
        return path.name.removesuffix(_GREEDY)
    return None


def slug(run_id: str) -> str:
    """``run_id`` as one path component: Airflow run ids hold ``:`` and ``+``."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in run_id)


def fsync_dir(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it becomes ``path``, whole and synced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        fsync_dir(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def clear_partial(directory: Path, name: str = "*") -> None:
    """Remove what killed writers of ``name`` (a glob) left of :func:`whole_file` in ``directory``.

    The caller holds the lock that writers of these files hold.
    """
    for partial in directory.glob(f".{name}.*.partial"):
        if partial.is_file():
            partial.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that ``path`` is either as before or complete."""
    with whole_file(path) as partial:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Raises DataError naming the file when it is missing or is not a JSON object."""
    remedy = "restore it, or move it away and rerun its phase"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing: run the phase that writes it first") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}): {remedy}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object: {remedy}")
    return value


def read_section(manifest: Path, section: str) -> dict[str, Any] | None:
    """One phase's section of a manifest; None when that phase has not finished. DataError when it
    is no JSON object."""
    if not manifest.exists():
        return None
    value = read_json(manifest).get(section)
    if value is not None and not isinstance(value, dict):
        raise DataError(
            f"section {section} of {manifest} is {value!r:.60}, needs an object: remove it and run"
            " its phase again"
        )
    return value


def write_section(manifest: Path, section: str, value: dict[str, Any]) -> bool:
    """Replace one section, the others untouched. False, nothing written, when it is the same."""
    sections = read_json(manifest) if manifest.exists() else {}
    if sections.get(section) == value:
        return False
    write_json(manifest, {**sections, section: value})
    return True


def drop_sections(manifest: Path, names: tuple[str, ...]) -> None:
    """Take back what phases said about files that are no longer as they left them."""
    if not manifest.exists():
        return
    sections = read_json(manifest)
    if any(name in sections for name in names):
        write_json(manifest, {k: v for k, v in sections.items() if k not in names})


def file_record(path: Path) -> dict[str, Any]:
    """``{bytes, sha256}`` of a file as it is now."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def digest(value: Any) -> str:
    """sha256 of ``value`` as canonical JSON: the same for equal values in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Hold ``lock`` for the block. Raises Busy at once when somebody else holds it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{lock} is held by another job: wait for it, or stop it first") from None
        yield
    finally:
        os.close(fd)
