"""A drafter of the demo's target, made by the real phases of the demo's recipe, and servers of it.

The rows are the target's greedy answers, by transformers: what generate and validate would have
left, without an engine. The servers are vLLM's, each in a process group of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from engines import reference
from engines.real_site import PROMPTS, READY_S, TARGET, command
from unit.random_targets import one_thread, write_tokenized

from demo.stack import ROOT, free_ports
from drafter import evaluate, export, extract, jsonl, plan, prepare, served, train
from drafter.evaluation import held_out
from drafter.files import read_json
from drafter.job import Job
from drafter.layout import ALL, DrafterRun, Workspace
from drafter.recipe import Recipe, parse_recipe

RECIPE = ROOT / "include" / "recipes" / "demo.toml"
SAMPLES = 50
"""Prompts of each of the eight sets."""

IN_FLIGHT = 48
STOP_S = 20.0
LOOK_S = 0.2
LOG_LINES = 30


class TrainedSite:
    """Workspace, recipe and the run in it. ``served_url`` drafts, ``plain_url`` does not."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ports = free_ports(2)
        self.served_url, self.plain_url = (f"http://127.0.0.1:{port}" for port in self.ports)
        self.workspace = Workspace(root / "workspace")
        self.answers: dict[str, list[int]] = {}
        """Of the target by transformers, by sample id."""

    def recipe(self, **evaluate: Any) -> Recipe:
        demo = tomllib.loads(RECIPE.read_text())
        names = {path.stem: path for path in sorted(PROMPTS.iterdir())}
        asked = {"kind": "vllm", "urls": [self.served_url], "plain_urls": [self.plain_url]}
        tree = {
            **{name: demo[name] for name in ("generate", "extract", "train")},
            "name": "trained",
            "target": {"path": str(TARGET), "revision": "demo-1"},
            "engine": {"urls": ["http://127.0.0.1:1"], "in_flight": IN_FLIGHT},
            "datasets": [
                {
                    "name": name,
                    "format": name.partition("_")[2],
                    "path": str(path),
                    "max_samples": SAMPLES,
                }
                for name, path in names.items()
            ],
            "evaluate": {**demo["evaluate"], "served": asked, **evaluate},
            "host": {"workspace": str(self.workspace.root), "python": sys.executable},
        }
        return parse_recipe(tree, "test")

    @property
    def run(self) -> DrafterRun:
        return self.workspace.drafter(plan.run_name(self.workspace, self.recipe()))

    def job(self, phase: str, dataset: str = ALL, **evaluate: Any) -> Job:
        directory = self.workspace.job(phase, dataset)
        directory.root.mkdir(parents=True, exist_ok=True)
        recipe = self.recipe(**evaluate)
        return Job(
            phase, dataset, recipe, directory, "s", "c", "r", "resume", None, IN_FLIGHT
        )  # fmt: skip

    def make(self) -> None:
        """From prompts to the export."""
        names = self.recipe().dataset_names
        prepare.run(self.job("prepare"))
        prompts = {name: self.prompt_ids(name) for name in names}
        together = {i: ids for each in prompts.values() for i, ids in each.items()}
        with one_thread():
            model = reference.load(TARGET, torch.float32)
            limit = self.recipe().evaluate.max_new_tokens
            self.answers = reference.greedy(model, together, limit)
            stop = model.generation_config.eos_token_id
            for name in names:
                rows = [
                    {"sample_id": i, "input_ids": ids + self.answers[i], "prompt_tokens": len(ids)}
                    for i, ids in prompts[name].items()
                ]
                write_tokenized(self.workspace.prepared(name), rows)
                extract.run(self.job("extract", name))
            train.run(self.job("train"))
            for name in names:
                self._answer(name, stop)
                evaluate.run(self.job("evaluate", name))
            export.run(self.job("export"))

    def prompt_ids(self, name: str) -> dict[str, list[int]]:
        lines = jsonl.rows(self.workspace.prepared(name).prompt_ids)
        return {line.value["sample_id"]: line.value["input_ids"] for line in lines}

    def held_out(self) -> dict[str, list[int]]:
        recipe = self.recipe()
        each = (held_out.prompts(self.workspace, recipe, name) for name in recipe.dataset_names)
        return {i: ids for prompts in each for i, ids in prompts.items()}

    def _answer(self, name: str, stop: int) -> None:
        """Leave what the engine would have answered for evaluate."""
        store, recipe = self.run.greedy(name), self.recipe()
        store.parent.mkdir(parents=True, exist_ok=True)
        with open(store, "w") as file:
            for sample_id in held_out.prompts(self.workspace, recipe, name):
                ids = self.answers[sample_id]
                row = {
                    "sample_id": sample_id,
                    "output_ids": ids,
                    "finish_reason": "stop" if ids[-1] == stop else "length",
                    "max_new_tokens": recipe.evaluate.max_new_tokens,
                }
                print(json.dumps(row), file=file)

    def measure(self, **evaluate: Any) -> dict[str, Any]:
        served.run(self.job("served", **evaluate))
        return read_json(self.run.served)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Both servers; nothing of them lives on."""
        drafts = {
            "method": "eagle3",
            "model": str(self.run.export("vllm")),
            "num_speculative_tokens": self.recipe().evaluate.draft_tokens,
        }
        flags = (("--speculative-config", json.dumps(drafts)), ())
        started = []
        try:
            for port, each in zip(self.ports, flags, strict=True):
                with open(self._log(port), "wb") as log:
                    argv = [*command("vllm", port, self.root), *each]
                    started.append(
                        subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
                    )
            for process, port in zip(started, self.ports, strict=True):
                self._await(process, port)
            yield
        finally:
            for process in started:
                process.terminate()
            for process in started:
                _end(process)

    def _log(self, port: int) -> Path:
        return self.root / f"vllm-{port}.log"

    def _await(self, process: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            assert process.poll() is None, self.engine_log()
            assert time.monotonic() < deadline, self.engine_log()
            with contextlib.suppress(httpx.RequestError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    return
            time.sleep(LOOK_S)

    def engine_log(self) -> str:
        """The last lines of both."""
        logs = [self._log(port) for port in self.ports]
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        return "\n".join(line for text in texts for line in text.splitlines()[-LOG_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """vLLM's workers outlive it only when it does not end by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
