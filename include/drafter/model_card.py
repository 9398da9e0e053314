"""The model card beside an exported drafter: what it is for, from what, how good, how to launch."""

from __future__ import annotations

import json
import shlex
from typing import Any

from drafter import jsonl
from drafter.files import file_record, read_section
from drafter.job import Job
from drafter.layout import DrafterRun, Workspace
from drafter.recipe import Recipe
from drafter.training import checkpoint

NAMES = {
    "trained": "this drafter",
    "no_states": "trained without the target's states",
    "ngram": "best n-gram table",
    "untrained": "untrained",
}
_PUBLISHED = ("target", "datasets", "generate", "validate", "extract", "train", "evaluate")
"""Sections of the recipe that decide what the drafter is. The others name hosts and people."""


def render(
    engine: str,
    job: Job,
    run_: DrafterRun,
    target: dict[str, Any],
    train: dict[str, Any],
    evaluations: dict[str, dict[str, Any]],
    lengths: dict[str, float | None],
) -> str:
    """Markdown; a function of the run's files and the code. ``target`` is its config.json."""
    recipe = job.recipe
    counts = train["counts"]
    exported = int(checkpoint.chosen(run_, recipe.train).name.removeprefix("step-"))
    directory = run_.export(engine)
    hashes = {
        name: file_record(directory / name)["sha256"]
        for name in ("model.safetensors", "config.json")
    }
    return f"""# EAGLE-3 drafter for {recipe.target.path}, for {engine}

Target revision `{recipe.target.revision}`. Run `{run_.root.name}`, code `{job.code}`.

Made of the target's weights and answers: the target's licence applies to it, and the datasets'
licences to what they allow of their prompts. Read them before it is passed on.

## Launch

```
{launch(engine, recipe, str(directory), target)}
```
{_remarks(engine, target)}
Add what the target needs on this host (parallelism, memory), as without a drafter.

## Acceptance length

Tokens per verification with {recipe.evaluate.draft_tokens} drafted, replayed over the target's
greedy answers to held-out prompts.

{_lengths(evaluations, lengths)}

## Training

{_beginning(train)} {counts["steps"]} steps over {counts["tokens"]} tokens of
{counts["trained_rows"]} rows ({counts["held_out_rows"]} held out{_left_out(counts)}), loss
{_short(counts["first_loss"])} to {_short(counts["last_loss"])}.

{_exported(run_, recipe, exported)}

{_exported_step(run_, exported)}

## Data

Rows and tokens as extracted; the hashes are of the manifests beside prompts and states.

{_data(job.workspace, recipe)}

## Recipe

```json
{_recipe(recipe)}
```

## Files

{chr(10).join(f"* `{name}` sha256 `{sha}`" for name, sha in hashes.items())}
"""


def launch(engine: str, recipe: Recipe, directory: str, target: dict[str, Any]) -> str:
    """The command that serves the target, with this config.json, beside the drafter."""
    drafted, path = recipe.evaluate.draft_tokens, shlex.quote(recipe.target.path)
    trust = " --trust-remote-code" * ("auto_map" in target)
    if engine == "sglang":
        return (
            f"python3 -m sglang.launch_server --model-path {path}{trust} \\\n"
            "  --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {shlex.quote(directory)} \\\n"
            f"  --speculative-num-steps {drafted} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {drafted + 1}"
        )
    config = {"method": "eagle3", "model": directory, "num_speculative_tokens": drafted}
    return f"vllm serve {path}{trust} \\\n  --speculative-config {shlex.quote(json.dumps(config))}"


def _remarks(engine: str, target: dict[str, Any]) -> str:
    if engine == "sglang" and "kv_lora_rank" in target.get("text_config", target):
        return (
            "\nWhere SGLang takes the attention backend trtllm_mla for the target, add\n"
            "`--speculative-draft-attention-backend trtllm_mha`: the drafter has no latent "
            "attention.\n"
        )
    return ""


def _beginning(train: dict[str, Any]) -> str:
    start = train["inputs"].get("start")
    return f"From an earlier drafter (sha256 `{start}`):" if start else "From a new drafter:"


def _exported(run_: DrafterRun, recipe: Recipe, step: int) -> str:
    marked = checkpoint.best(run_)
    is_best = marked is not None and marked.step == step
    held_out = f", held-out loss {marked.held_out_loss:.4f}" if marked and is_best else ""
    return f"Exported is step {step} of {recipe.train.steps}{held_out}."


def _left_out(counts: dict[str, Any]) -> str:
    return "".join(f", {n} left out: {why}" for why, n in counts["left_out"].items())


def _exported_step(run_: DrafterRun, exported: int) -> str:
    """Loss and accuracy of every draft step where the exported checkpoint was taken."""
    last: dict[str, Any] = {}
    for line in jsonl.rows(run_.metrics):
        if line.value["step"] <= exported:
            last = line.value
    steps = range(sum(name.startswith("loss_") for name in last))
    if not steps:
        return "No step was taken."
    lines = [f"| {i} | {last[f'loss_{i}']:.3f} | {last[f'acc_{i}']:.3f} |" for i in steps]
    head = ["| draft step | loss of the last batch | its accuracy |", "| --- | --- | --- |"]
    return "\n".join(head + lines)


def _data(workspace: Workspace, recipe: Recipe) -> str:
    lines = [
        "| dataset | format | revision | rows | tokens | prompts' manifest | states' manifest |",
        "| --- |" + " --- |" * 6,
    ]
    for dataset in recipe.datasets:
        hidden, prepared = workspace.hidden_states(dataset.name), workspace.prepared(dataset.name)
        counts = (read_section(hidden.manifest, "extract") or {}).get("counts", {})
        hashes = [
            f"`{file_record(path)['sha256']}`" if path.exists() else "-"
            for path in (prepared.manifest, hidden.manifest)
        ]
        cells = [dataset.name, dataset.format, dataset.revision or "-", counts.get("rows", "-")]
        cells += [counts.get("tokens", "-"), *hashes]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _recipe(recipe: Recipe) -> str:
    sections = {name: value for name, value in recipe.as_json().items() if name in _PUBLISHED}
    sections["evaluate"] = recipe.evaluate.rules()
    private = [("extract", "urls"), ("extract", "api_key_env"), ("train", "start_from")]
    for section, field in private:
        del sections[section][field]
    return json.dumps(sections, indent=1, sort_keys=True)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _lengths(evaluations: dict[str, dict[str, Any]], lengths: dict[str, float | None]) -> str:
    rows = {name: each["acceptance_length"] for name, each in evaluations.items()}
    rows["**overall**"] = lengths
    lines = [
        f"| dataset | {' | '.join(NAMES.values())} |",
        f"| --- |{' --- |' * len(NAMES)}",
    ]
    for dataset, values in rows.items():
        cells = (_short(values[name]) for name in NAMES)
        lines.append(f"| {dataset} | {' | '.join(cells)} |")
    return "\n".join(lines)
