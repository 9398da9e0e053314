"""Servers that extract, without an engine: real HTTP, real files under a real flock, real states.

The states are those that transformers makes of a small model in this process; a fault is a field.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from unit.fake_engine import FakeEngine, Reply

from drafter.backends.transformers import TransformersBackend

Layers = Callable[[list[int]], torch.Tensor]
"""Row -> [T, layers, D]."""


def layers_of(target: Path, num_layers: int, layers: Sequence[int]) -> Layers:
    """HF ``hidden_states``; ``num_layers`` stands for what enters the last norm."""
    backend = TransformersBackend(target, torch.float32, [k for k in layers if k < num_layers])

    def states(row: list[int]) -> torch.Tensor:
        (got,) = backend.features([row])
        final = [got.final_TD[:, None]] if num_layers in layers else []
        return torch.cat([got.aux_TAD, *final], dim=1)

    return states


class FakeVLLMStates(FakeEngine):
    """vLLM with extract_hidden_states, as 0.32.0 does it."""

    path = "/v1/completions"
    prompt_key = "prompt"

    def __init__(
        self,
        target: Path,
        directory: Path,
        states: Layers,
        fault: Literal[
            "short", "foreign ids", "garbage", "unwritten", "no lock", "no file", "no directory",
            "no path", "own name", "flat",
        ]
        | None = None,
        write_delay_s: float = 0.0,
        disturb: Callable[[int], Reply | None] = lambda _number: None,
        **more: Any,
    ) -> None:  # fmt: skip
        """``disturb``: what is answered to the request of that number instead, from 1."""
        super().__init__(self._answer, **more)
        self.model_path = str(target)
        self.directory = directory
        self.states = states
        self.fault = fault
        self.write_delay_s = write_delay_s
        self.disturb = disturb

    def about(self) -> dict[str, Any]:
        model = {"id": "served", "root": self.model_path, "max_model_len": self.context}
        return {"/v1/models": {"object": "list", "data": [model]}}

    def _answer(self, request: dict[str, Any], number: int, _again: int) -> Reply:
        if (reply := self.disturb(number)) is not None:
            return reply
        body: dict[str, Any] = {"choices": [{"text": "x"}], "kv_transfer_params": None}
        if self.fault != "no path":
            path = self._hand_over(request)
            body["kv_transfer_params"] = {"hidden_states_path": str(path)}
        return Reply(body=body)

    def _hand_over(self, request: dict[str, Any]) -> Path:
        stem = "states" if self.fault == "own name" else f"cmpl-{request['request_id']}-0-5ca1ab1e"
        path = self.directory / f"{stem}.safetensors"
        if self.fault == "no directory":
            return self.directory / "elsewhere" / path.name
        if self.fault == "no file":
            return path
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        row = request["prompt"]

        def write() -> None:
            if self.fault == "garbage":
                path.write_bytes(b"\xff" * 100)
            elif self.fault != "unwritten":
                self._save(path, row)
            if self.fault == "no lock":
                os.unlink(f"{path}.lock")
            os.close(lock)

        if self.write_delay_s:
            self._loop.call_later(self.write_delay_s, write)
        else:
            write()
        return path

    def _save(self, path: Path, row: list[int]) -> None:
        ids, states = torch.tensor(row), self.states(row)
        if self.fault == "short":
            states = states[1:].contiguous()
        elif self.fault == "foreign ids":
            ids = ids.flip(0).contiguous()
        elif self.fault == "flat":
            states = states.flatten(1)
        save_file({"token_ids": ids, "hidden_states": states}, path)


class FakeSGLangStates(FakeEngine):
    """SGLang that returns auxiliary states, as 0.5.23 does it."""

    def __init__(
        self,
        target: Path,
        states: Layers,
        told: dict[str, Any],
        spoil: Callable[[list[list[float]]], Any] = lambda rows: [rows],
        disturb: Callable[[int], Reply | None] = lambda _number: None,
        **more: Any,
    ) -> None:
        """``told`` in /server_info besides the model; ``spoil`` makes meta_info.hidden_states."""
        super().__init__(self._answer, **more)
        self.model_path = str(target)
        self.states = states
        self.told = told
        self.spoil = spoil
        self.disturb = disturb

    def about(self) -> dict[str, Any]:
        return {"/server_info": {"model_path": self.model_path, **self.told}}

    def _answer(self, request: dict[str, Any], number: int, _again: int) -> Reply:
        if (reply := self.disturb(number)) is not None:
            return reply
        assert request["return_hidden_states"] is True
        rows = self.states(request["input_ids"]).flatten(1).tolist()
        meta = {"finish_reason": {"type": "length"}, "hidden_states": self.spoil(rows)}
        return Reply(body={"output_ids": [1], "meta_info": meta})
