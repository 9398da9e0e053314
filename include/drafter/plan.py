"""What a start would do, per dataset, and why: decided from files, before anything is done.

A phase is done on a dataset when its manifest section exists and the ``inputs`` stored in it equal
:func:`inputs` now. Phases store exactly that value, so that "done" has one meaning everywhere: the
plan in the UI, the start command and the joins all ask here. Never writes. Pydantic and the
standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

from drafter import source_files
from drafter.errors import DataError, RecipeError
from drafter.extraction import imported
from drafter.files import count_lines, digest, file_record, read_json, read_section
from drafter.generation import approval
from drafter.identity import (
    config_files,
    generation_identity,
    target_identity,
    tokenizer_software,
)
from drafter.layout import ALL, Prepared, Workspace
from drafter.recipe import Recipe
from drafter.training import start_files

PER_DATASET = ("generate", "validate", "extract", "evaluate")
OVER_ALL = ("prepare", "spool", "train", "export", "served")
PHASES = PER_DATASET + OVER_ALL

Mode = Literal["resume", "restart", "adopt"]
"""What to do with rows that are there: go on; move them away first; go on, and take over rows of an
older run without a manifest."""

MODES: tuple[str, ...] = get_args(Mode)
Action = Literal[
    "done", "start", "resume", "restart", "wait", "adopt", "refuse", "pilot", "approve"
]
"""``pilot``: rows of one are missing; ``approve``: they wait for a person's approval."""

MISSING_BYTES = "missing_bytes"
"""Among the counts of a plan that is refused because the disk, which all share, lacks room."""


@dataclass(frozen=True)
class Plan:
    """One line of the plan."""

    phase: str
    dataset: str
    action: Action
    reason: str
    counts: dict[str, Any]
    exit_code: int = 0
    """Of the error that a start would end with, where that is known: of "refuse"."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def decide(
    phase: str,
    dataset: str,
    workspace: Workspace,
    recipe: Recipe,
    *,
    token_budget: int | None = None,
    mode: str = "resume",
    run_id: str = "",
) -> Plan:
    """What starting ``phase`` on ``dataset`` would do. ``token_budget`` overrides the recipe's."""
    section = read_phase(phase, dataset, workspace, recipe)
    counts = section["counts"] if section else {}

    def plan(action: Action, reason: str) -> Plan:
        if phase == "extract" and recipe.spools:
            reason += "; not needed, the recipe spools: the train DAG makes its states itself"
        exit_code = DataError.exit_code if action == "refuse" else 0
        return Plan(phase, dataset, action, reason, counts, exit_code)

    if phase == "extract" and imported.is_so(section):
        return plan(*_imported(dataset, section, workspace, recipe))
    prepared = workspace.prepared(dataset)
    archived = bool(run_id) and prepared.archive(run_id).exists()
    if phase == "generate" and mode == "restart" and is_begun(prepared) and not archived:
        stored = count_lines(prepared.responses)
        anew = "all is generated anew" + (", a pilot first" if recipe.pilot else "")
        return plan("restart", f"{stored} responses move to archive/ and {anew}")
    try:
        wanted = inputs(phase, dataset, workspace, recipe)
    except DataError as error:
        instead = _instead_of_rows(dataset, workspace, recipe) if phase == "validate" else None
        return plan(*(instead or ("wait", str(error))))
    if phase == "generate":
        stored = count_lines(prepared.responses)
        shortfall = None
        if section and section["inputs"] == wanted:
            limits = recipe.dataset(dataset)
            budget = limits.token_budget if token_budget is None else token_budget
            shortfall = _shortfall(section, budget, limits.max_samples, prepared)
            if shortfall is None:
                return plan("done", f"stop reason: {section['stop_reason']}")
        pilot = approval.pending_of(dataset, workspace, recipe, wanted["identity"])
        if pilot:
            return plan("approve" if pilot.is_complete else "pilot", pilot.reason)
        if shortfall:
            return plan("resume", f"{stored} responses stored; {shortfall}")
        if stored:
            return plan("resume", f"{stored} responses stored")
        return plan("start", f"{count_lines(prepared.prompt_ids)} prompts, no responses yet")
    if section is None:
        return plan("start", "not done yet")
    if section["inputs"] == wanted:
        if spoilt := changed_files(phase, dataset, workspace, recipe):
            return plan("start", f"missing or changed: {', '.join(spoilt)}")
        if phase == "spool" and decide("train", dataset, workspace, recipe).action != "done":
            return plan("start", "training needs its states once more")
        return plan("done", "its inputs are unchanged")
    changed = sorted(k for k in wanted if section["inputs"].get(k) != wanted[k])
    return plan("start", f"changed since it was done: {', '.join(changed)}")


def inputs(phase: str, dataset: str, workspace: Workspace, recipe: Recipe) -> dict[str, Any]:
    """Everything that the result of ``phase`` on ``dataset`` depends on, code and limits excepted.

    Raises DataError when an earlier phase has not finished, RecipeError when the target or a source
    is not where the recipe says.
    """
    if phase == "prepare":
        return {
            "target": target_identity(recipe),
            "max_prompt_tokens": recipe.generate.max_prompt_tokens,
            "seed": recipe.generate.seed,
            "sources": {
                source.name: {
                    "format": source.format,
                    "revision": source.revision,
                    "max_samples": source.max_samples,
                    "max_prompt_tokens": source.max_prompt_tokens,
                    **source_files.identity(source),
                }
                for source in recipe.datasets
            },
        }
    prepared = workspace.prepared(dataset)
    if phase == "generate":
        return {
            "prompt_ids": _finished(prepared.manifest, "prepare")["files"][
                prepared.prompt_ids.name
            ],
            "identity": generation_identity(recipe),
        }
    if phase == "validate":
        if not prepared.responses.exists():
            raise DataError(f"{dataset} has no responses yet: run generate first")
        _finished(prepared.manifest, "prepare")
        return {
            "responses": file_record(prepared.responses),
            "prompt_ids": _record(prepared.prompt_ids),
            # For the tools that they declare.
            "prompts": _record(prepared.prompts),
            # How many rows a person reads decides nothing about them.
            "rules": recipe.validate_.model_dump(mode="json", exclude={"audit_rows"}),
            "target": target_identity(recipe),
            "configs": config_files(Path(recipe.target.path)),
            "software": tokenizer_software(),
        }
    if phase == "extract":
        return {
            "tokenized": _finished(prepared.manifest, "validate")["files"][prepared.tokenized.name],
            "extract": recipe.extract.rules(),
            "target": target_identity(recipe),
        }
    if phase == "spool" and not recipe.spools:
        raise RecipeError("the recipe does not spool: set train.spool_shards, or run extract")
    if phase in ("spool", "train"):
        states = _to_be_made if recipe.spools else _stored
        start = start_files.identity(recipe.train.start_from)
        return {**states(workspace, recipe), "train": recipe.train.rules(), **start}
    if phase == "served" and recipe.evaluate.served is None:
        raise RecipeError(
            "the recipe names no server that drafts: add [evaluate.served] with the urls of one"
        )
    run = workspace.drafter(run_name(workspace, recipe))
    trained = digest(_finished(run.manifest, "train")["inputs"])
    if phase == "evaluate":
        return {
            "train": trained,
            "checkpoint": recipe.train.export,
            "dataset": dataset,
            "evaluate": recipe.evaluate.rules(),
        }
    if phase == "export":
        evaluated = {
            name: digest(_evaluation(run.evaluation(name))) for name in recipe.dataset_names
        }
        return {"train": trained, "checkpoint": recipe.train.export, "evaluated": evaluated}
    if phase == "served":
        exported = _finished(run.manifest, "export")["files"]
        # The model card may tell what was measured with the files.
        weights = {name: file for name, file in exported.items() if not name.endswith(".md")}
        return {"export": digest(weights), "evaluate": recipe.evaluate.model_dump(mode="json")}
    raise RecipeError(f"no phase {phase!r}: there are {', '.join(PHASES)}")


def read_phase(
    phase: str, dataset: str, workspace: Workspace, recipe: Recipe
) -> dict[str, Any] | None:
    """The section that ``phase`` left for ``dataset``; None when it has not finished."""
    if phase == "prepare":
        return _prepared_together(workspace, recipe)
    if phase in ("generate", "validate"):
        return read_section(workspace.prepared(dataset).manifest, phase)
    if phase == "extract":
        return read_section(workspace.hidden_states(dataset).manifest, phase)
    try:
        run = workspace.drafter(run_name(workspace, recipe))
    except DataError:
        return None
    if phase == "evaluate":
        path = run.evaluation(dataset)
        return read_json(path) if path.exists() else None
    if phase == "served":
        return read_json(run.served) if run.served.exists() else None
    return read_section(run.manifest, phase)


def joined(phase: str, workspace: Workspace, recipe: Recipe) -> dict[str, Any]:
    """Whether ``phase`` is done on every dataset, and one hash over what it left.

    ``{"missing": [dataset, ...], "digest": hex}``; a join announces each digest once.
    """
    missing = [
        name
        for name in recipe.dataset_names
        if decide(phase, name, workspace, recipe).action != "done"
    ]
    left = {name: read_phase(phase, name, workspace, recipe) for name in recipe.dataset_names}
    keep = _states if phase == "extract" else itemgetter("files")
    kept = {name: section and keep(section) for name, section in left.items()}
    return {"missing": missing, "digest": digest(kept)}


def is_begun(prepared: Prepared) -> bool:
    """Did generate leave anything that a restart moves away: a section, answers or failures?"""
    return read_section(prepared.manifest, "generate") is not None or any(
        path.exists() and path.stat().st_size > 0 for path in (prepared.responses, prepared.failed)
    )


def changed_prompts(workspace: Workspace, recipe: Recipe) -> list[str]:
    """Files of prepare that are missing or have another size than it left them with."""
    changed = []
    for name in recipe.dataset_names:
        prepared = workspace.prepared(name)
        section = read_section(prepared.manifest, "prepare") or {}
        for file, record in section.get("files", {}).items():
            path = prepared.root / file
            if not path.exists() or path.stat().st_size != record["bytes"]:
                changed.append(f"{name}/{file}")
    return changed


def run_name(workspace: Workspace, recipe: Recipe) -> str:
    """Name of the training run over what is extracted now: another set is another run, but a
    baseline is trained beside what is there."""
    wanted = inputs("train", ALL, workspace, recipe)
    del wanted["train"]["no_states_baseline"]
    return digest(wanted)[:12]


def changed_files(phase: str, dataset: str, workspace: Workspace, recipe: Recipe) -> list[str]:
    """Files that a finished phase left and that are missing, or not what they were.

    By size; what validate left by hash too, since a sensor that found a difference says to run
    validate again.
    """
    if phase == "prepare":
        return changed_prompts(workspace, recipe)
    section = read_phase(phase, dataset, workspace, recipe) or {}
    if phase in ("spool", "train", "export", "served"):
        root = workspace.drafter(run_name(workspace, recipe)).root
    elif phase == "extract":
        root = workspace.hidden_states(dataset).root
    else:
        root = workspace.prepared(dataset).root

    def is_as_left(path: Path, record: dict[str, Any]) -> bool:
        if not path.exists() or path.stat().st_size != record["bytes"]:
            return False
        return phase != "validate" or file_record(path) == record

    records = {**section.get("files", {}), **section.get("report", {})}
    return [name for name, record in records.items() if not is_as_left(root / name, record)]


def _imported(
    dataset: str, section: dict[str, Any], workspace: Workspace, recipe: Recipe
) -> tuple[imported.Verdict, str]:
    spoilt = changed_files("extract", dataset, workspace, recipe)
    return imported.judge(section, spoilt, workspace.hidden_states(dataset), recipe)


def _instead_of_rows(
    dataset: str, workspace: Workspace, recipe: Recipe
) -> tuple[Action, str] | None:
    """Of validate, for a dataset without rows whose states another system made; None for others."""
    section = read_phase("extract", dataset, workspace, recipe)
    rows = workspace.prepared(dataset).responses
    if recipe.spools or rows.exists() or not imported.is_so(section):
        return None
    verdict, reason = _imported(dataset, section, workspace, recipe)
    return ("done", imported.NO_ROWS) if verdict == "done" else ("wait", reason)


def _shortfall(
    section: dict[str, Any], budget: int | None, max_samples: int | None, prepared: Prepared
) -> str | None:
    """Why a finished generation is not finished under today's limits; None when it is."""
    size = prepared.responses.stat().st_size if prepared.responses.exists() else 0
    if size != section["files"][prepared.responses.name]["bytes"]:
        return "the file changed since generation ended"
    tokens = section["counts"]["completion_tokens"]
    if section["stop_reason"] == "budget" and (budget is None or tokens < budget):
        return f"{tokens} tokens of a raised budget of {budget}"
    prompts = section["counts"].get("prompts", 0)
    if section["stop_reason"] == "quota" and (max_samples is None or prompts < max_samples):
        there = count_lines(prepared.prompt_ids)
        if prompts < there:
            return f"{prompts} prompts of a raised quota of {min(there, max_samples or there)}"
    return None


def _stored(workspace: Workspace, recipe: Recipe) -> dict[str, Any]:
    """States that extract left, for a training that reads them."""
    return {
        "datasets": {
            name: digest(_states(_finished(workspace.hidden_states(name).manifest, "extract")))
            for name in recipe.dataset_names
        }
    }


def _to_be_made(workspace: Workspace, recipe: Recipe) -> dict[str, Any]:
    """What decides states that are made beside training: not the bound that they are judged by."""
    rules = recipe.extract.rules()
    del rules["min_argmax_share"]
    tokenized = {}
    for name in recipe.dataset_names:
        prepared = workspace.prepared(name)
        files = _finished(prepared.manifest, "validate")["files"]
        tokenized[name] = files[prepared.tokenized.name]
    return {"tokenized": tokenized, "extract": rules, "target": target_identity(recipe)}


def _states(section: dict[str, Any]) -> dict[str, Any]:
    """What training sees of an extraction: not the bound it was judged by, nor what it measured."""
    return {
        "identity": section["identity"],
        "files": section["files"],
        "left_out": section["counts"]["left_out"],
    }


def _finished(manifest: Path, section: str) -> dict[str, Any]:
    value = read_section(manifest, section)
    if value is None:
        raise DataError(f"{manifest.parent.name}: {section} has not finished, run it first")
    return value


def _evaluation(path: Path) -> Any:
    if not path.exists():
        raise DataError(f"{path.stem} is not evaluated yet: run evaluate first")
    return read_json(path)


def _record(path: Path) -> dict[str, Any] | None:
    return file_record(path) if path.exists() else None


def _prepared_together(workspace: Workspace, recipe: Recipe) -> dict[str, Any] | None:
    """prepare is done once, for all: None unless every dataset holds the same ``inputs``."""
    sections = {
        name: read_section(workspace.prepared(name).manifest, "prepare")
        for name in recipe.dataset_names
    }
    first = sections[recipe.dataset_names[0]]
    if first is None or any(s is None or s["inputs"] != first["inputs"] for s in sections.values()):
        return None
    return {
        "inputs": first["inputs"],
        "counts": {name: section["counts"] for name, section in sections.items() if section},
    }
