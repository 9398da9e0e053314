"""speculators 0.9.0 behind a pipe: one JSON command per line in, one JSON answer per line out.

Runs in the environment of speculators, on a CPU; peer.py is the other end. Model, loss, shift and
packing are the package's own; the loop around them is here, because its Trainer wants a GPU.

    load     directory, attention           a checkpoint of theirs or an export/vllm of ours
    data     path, batches                  rows of a shard, packed as lists of row numbers
    judge    batch, ttt_steps, decay, output, ours
                                            logits, losses and gradients of one batch, to a file
    train    batches, rates, ttt_steps, decay, clip
                                            optimiser steps; answers with the seconds they took
    grown    batches, rates, ...            the same, answers with bytes: peak beyond what was there
    save     directory                      a checkpoint, by the package's own writer
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.losses.utils import _LOSS_REDUCTION_EPS
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn

LOSS = resolve_loss_config("kl_div", "eager")


class Worker:
    def load(self, directory: str, attention: str) -> dict:
        config = Eagle3SpeculatorConfig.from_pretrained(directory)
        config.transformer_layer_config._attn_implementation = attention
        self.model = Eagle3DraftModel.from_pretrained(
            directory, config=config, dtype=torch.float32
        ).train()
        # Absent from the checkpoint, it is memory as it was found; the package looks for NaN.
        self.model._load_verifier_weights(overwrite_embed_tokens=True)
        assert self.model._attn_impl == attention
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), weight_decay=0.0, fused=True)
        return {"trained": sorted(self.trained)}

    def data(self, path: str, batches: list[list[int]]) -> dict:
        tensors = load_file(path)
        rows = [_row(tensors, number) for number in range(len(tensors["prompt_tokens"]))]
        self.batches = [_packed([rows[number] for number in batch]) for batch in batches]
        return {}

    def judge(self, batch: int, ttt_steps: int, decay: float, output: str, ours: bool) -> dict:
        """``ours``: only the slots that the drafter's own training supervises."""
        inputs, loss = self.batches[batch], LOSS
        if ours:
            inputs, loss = _supervised_as_ours(inputs)
        logits = []
        hook = self.model.lm_head.register_forward_hook(lambda *args: logits.append(args[2][0]))
        _, total, metrics = self.model(
            **inputs, ttt_steps=ttt_steps, ttt_step_loss_decay=decay, loss_config=loss
        )
        hook.remove()
        total.backward()
        tensors = {f"gradient.{name}": p.grad.contiguous() for name, p in self.trained.items()}
        tensors |= {f"logits.{i}": each.detach().contiguous() for i, each in enumerate(logits)}
        save_file(tensors, output)
        self.optimizer.zero_grad()
        steps = range(ttt_steps)
        return {
            "loss": total.item(),
            "losses": [metrics[f"loss_{i}_sum"].item() for i in steps],
            "supervised": [int(metrics[f"full_acc_{i}_total"]) for i in steps],
        }

    def train(
        self, batches: list[int], rates: list[float], ttt_steps: int, decay: float, clip: float
    ) -> dict:
        began = time.perf_counter()
        for number, rate in zip(batches, rates, strict=True):
            _, loss, metrics = self.model(
                **self.batches[number],
                ttt_steps=ttt_steps,
                ttt_step_loss_decay=decay,
                loss_config=LOSS,
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained.values(), clip)
            {name: value.item() for name, value in metrics.items()}  # as its Trainer logs them
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began, "loss": loss.item()}

    def grown(self, **options) -> dict:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status_bytes("VmRSS")
        self.train(**options)
        return {"bytes": _status_bytes("VmHWM") - before}

    def save(self, directory: str) -> dict:
        self.model.save_pretrained(directory)
        return {}


def _row(tensors: dict, number: int) -> dict:
    begin, end = tensors["offsets"][number : number + 2].tolist()
    length = end - begin
    mask = torch.arange(length) >= tensors["prompt_tokens"][number]
    return {
        "input_ids": tensors["input_ids"][begin:end],
        "hidden_states": tensors["aux"][begin:end].flatten(1),
        "verifier_last_hidden_states": tensors["final"][begin:end],
        "loss_mask": mask,
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }


def _packed(rows: list[dict]) -> dict:
    length = sum(len(row["input_ids"]) - 1 for row in rows)
    hidden = rows[0]["verifier_last_hidden_states"].shape[1]
    packed = CollateFn(length, hidden, dtype=torch.float32, preprocess=shift_batch)(rows)
    del packed["error_records"]
    return packed


def _supervised_as_ours(inputs: dict) -> tuple[dict, dict]:
    """Its inputs and its loss, told to leave out what ours leaves out, and to divide as ours does.

    The last slot of each document loses its place in the mask. A later step is judged where the
    target is supervised, wherever its draft began; the loss drops those that began elsewhere.
    """
    document = inputs["document_ids"][0]
    last = torch.cat([document[1:] != document[:-1], torch.tensor([True])])
    mask = inputs["loss_mask"] & ~last
    length, (name, (function, weight)) = len(document), next(iter(LOSS.items()))

    def kept(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        step = length - logits.shape[1]
        begins, ends = slice(0, length - step), slice(step, length)
        whole = mask[0, begins] & mask[0, ends] & (document[begins] == document[ends])
        divisor = mask[0, ends].sum() + _LOSS_REDUCTION_EPS
        return function(logits, targets) * whole * divisor / whole.sum().clamp(min=1)

    return inputs | {"loss_mask": mask}, {name: (kept, weight)}


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) << 10


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the package prints; standard output is for answers
    torch.set_num_threads(int(sys.argv[1]))
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
