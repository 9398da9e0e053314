"""serve, probe, engine: the embedded engine, one request to the recipe's, and that as a job."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from drafter.commands import Add, prepared_of, print_json, recipe_of, workspace_of
from drafter.errors import RecipeError
from drafter.layout import ALL


def add_to(add: Add) -> None:
    serve = add("serve", _serve, "embedded engine: SGLang's /generate over a tiny model")
    serve.add_argument("--model", type=Path, required=True)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, required=True)

    probe = add(
        "probe", _probe, "one raw request and the engine's raw answer; 1,024 tokens at most"
    )
    probe.add_argument("--dataset", help="whose prompt; default: the recipe's first")
    probe.add_argument("--sample", metavar="ID", help="default: the first prompt")
    probe.add_argument("--url", help="default: the recipe's first")
    probe.add_argument("--full", action="store_true", help="long texts whole")

    engine = add(
        "engine",
        _engine,
        "the recipe's engine as a job: start or follow it as JSON on stdin says, stop it unless"
        " jobs use it, run it in the foreground as its supervisor does",
    )
    engine.add_argument("act", choices=("start", "stop", "run"))
    engine.add_argument("--request", help="with stop: who asks; a later start by them is refused")


def _engine(arguments: argparse.Namespace) -> int:
    from drafter import engine_job
    from drafter.job import load_job
    from drafter.recipe import parse_recipe

    if arguments.act == "start":
        try:
            asked = json.load(sys.stdin)
        except ValueError as error:
            raise RecipeError(
                f"no engine on stdin ({error}): trigger the DAG, which writes it"
            ) from None
        recipe = parse_recipe(asked.pop("recipe"), "job")
        print_json(engine_job.start(recipe, **asked))
        return 0
    workspace = workspace_of(arguments)
    if arguments.act == "stop":
        print_json(engine_job.stop(workspace, arguments.request))
    else:
        engine_job.run(load_job(workspace.job(engine_job.PHASE, ALL).root))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from drafter.engines.embedded import serve

    serve(arguments.model, arguments.host, arguments.port)
    return 0


def _probe(arguments: argparse.Namespace) -> int:
    """Exits 0 when the answer would be stored."""
    from drafter import template
    from drafter.generation import probe
    from drafter.show import ELIDED_AT, Reader
    from drafter.terminal import colours, painter

    workspace = workspace_of(arguments)
    recipe = recipe_of(workspace)
    prepared = prepared_of(workspace, arguments.dataset or recipe.dataset_names[0])
    sample_id, prompt_ids = probe.find_prompt(prepared, arguments.sample)
    target = Path(recipe.target.path)
    family = template.family(target)
    reader = Reader(template.load_tokenizer(target), family, recipe.target)
    print(f"{sample_id}, {len(prompt_ids):,} prompt tokens", flush=True)
    exchange = probe.send(recipe, family, sample_id, prompt_ids, arguments.url)
    limit = None if arguments.full else ELIDED_AT
    for line in probe.render(exchange, reader, painter(colours(sys.stdout)), limit):
        print(line)
    probe.refuse(recipe, exchange)
    return 0 if exchange.outcome.row else 1
