"""The model card beside an exported drafter: what it is for, from what, how good, how to launch."""

from __future__ import annotations

from typing import Any

from drafter.files import file_record
from drafter.layout import DrafterRun
from drafter.recipe import Recipe

NAMES = {
    "trained": "this drafter",
    "no_states": "trained without the target's states",
    "ngram": "best n-gram table",
    "untrained": "before training",
}


def render(
    engine: str,
    run_: DrafterRun,
    recipe: Recipe,
    train: dict[str, Any],
    evaluations: dict[str, dict[str, Any]],
    lengths: dict[str, float | None],
) -> str:
    """Markdown; a function of the run's files."""
    counts = train["counts"]
    directory = run_.export(engine)
    hashes = {
        name: file_record(directory / name)["sha256"]
        for name in ("model.safetensors", "config.json")
    }
    return f"""# EAGLE-3 drafter for {recipe.target.path}, for {engine}

Target revision `{recipe.target.revision}`. Run `{run_.root.name}`.

## Launch

```
{launch(engine, recipe, str(directory))}
```

## Acceptance length

Tokens per verification with {recipe.evaluate.draft_tokens} drafted, replayed over the target's
greedy answers to held-out prompts.

{_table(evaluations, lengths)}

## Training

{counts["steps"]} steps over {counts["tokens"]} tokens of {counts["trained_rows"]} rows
({counts["held_out_rows"]} held out), loss {_short(counts["first_loss"])} to
{_short(counts["last_loss"])}.
Datasets: {", ".join(f"{d.name} ({d.format}, revision {d.revision})" for d in recipe.datasets)}.

## Files

{chr(10).join(f"* `{name}` sha256 `{sha}`" for name, sha in hashes.items())}
"""


def launch(engine: str, recipe: Recipe, directory: str) -> str:
    """The command that serves the target with the drafter."""
    drafted = recipe.evaluate.draft_tokens
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {recipe.target.path} \\\n"
            f"  --speculative-algorithm EAGLE3 --speculative-draft-model-path {directory} \\\n"
            f"  --speculative-num-steps {drafted} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {drafted + 1}"
        )
    config = f'{{"method": "eagle3", "model": "{directory}", "num_speculative_tokens": {drafted}}}'
    return f"vllm serve {recipe.target.path} \\\n  --speculative-config '{config}'"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(evaluations: dict[str, dict[str, Any]], lengths: dict[str, float | None]) -> str:
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
