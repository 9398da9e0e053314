"""Write the demo's eight prompt files, each in the schema of the public dataset it stands for.

    cd include && python -m demo.make_prompts

Every row is drawn from ``language``; none is copied. The answers in the rows are "another model's":
the pipeline drops them. A few rows per file carry the faults that the public files are known for,
because a converter that has never met them proves nothing (see ``faults``).
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from demo import faults
from demo.language import DATASETS, Dialogue, dialogue

PROMPTS = Path(__file__).parent / "prompts"

NUM_ROWS = 160
"""Rows of a file before faults are added: eight times this trains the demo's drafter."""

SEED = 7
"""Not the seed of make_target: the target must not have met these prompts."""

Row = dict[str, Any]

GLAIVE_SYSTEM = (
    "SYSTEM: You are a helpful assistant with access to the following functions. "
    "Use them if required -\n"
)


def b1_glaive(talk: Dialogue, number: int) -> Row:
    """Flat text; functions as objects between blank lines, arguments in single quotes."""
    indent = 2 if number % 10 == 0 else None
    functions = "\n\n".join(json.dumps(f, indent=indent) for f in talk.functions)
    turns = []
    for exchange in talk.exchanges:
        speaker = "USER" if exchange.role == "user" else "FUNCTION RESPONSE"
        turns.append(f"{speaker}: {exchange.asked}")
        said = exchange.answer
        if exchange.call:
            said = f'<functioncall> {{"name": "{exchange.call}", "arguments": \'{said}\'}}'
        turns.append(f"ASSISTANT: {said} <|endoftext|>")
    return {"system": GLAIVE_SYSTEM + functions, "chat": "\n\n\n".join(turns) + "\n\n\n"}


def b2_opencodeinstruct(talk: Dialogue, number: int) -> Row:
    """Every field a string; three of them hold JSON text."""
    (exchange,) = talk.exchanges
    return {
        "id": _hash(exchange.asked)[:32],
        "input": exchange.asked,
        "output": f"```python\n{exchange.answer}\n```",
        "domain": ("generic", "algorithmic")[number % 2],
        "generation_algorithm": ("self-instruct", "evol-instruct")[number % 3 % 2],
        "llm_judgement": json.dumps({"logical_correctness": {"score": 1 + number % 5}}),
        "unit_tests": json.dumps([f"assert go() == {exchange.answer.split()[-1]!r}"]),
        "tests_execution_status": json.dumps(["pass" if number % 4 else "fail"]),
        "average_test_score": "1" if number % 4 else "0.5",
    }


def b3_magicoder(talk: Dialogue, number: int) -> Row:
    (exchange,) = talk.exchanges
    return {
        "lang": ("rust", "cpp", "typescript")[number % 3],
        "raw_index": number * 37,
        "index": number,
        "seed": "" if number % 20 == 0 else f"let hops = {number};",
        "openai_fingerprint": "fp_demo",
        "problem": exchange.asked,
        "solution": f"```rust\n{exchange.answer}\n```",
    }


def b4_mixturethoughts(talk: Dialogue, number: int) -> Row:
    (exchange,) = talk.exchanges
    said = f"<think>\n{exchange.thinking}\n</think>\n\n{exchange.answer}"
    return {
        "messages": [
            {"content": exchange.asked, "role": "user"},
            {"content": said, "role": "assistant"},
        ],
        "num_tokens": len(said.split()),
        "source": ("demo/math", "demo/code", "demo/science")[number % 3],
    }


def b5_openthoughts(talk: Dialogue, number: int) -> Row:
    """OpenThoughts3: roles are human and gpt, difficulty is null for mathematics."""
    (exchange,) = talk.exchanges
    domain = ("math", "math", "code", "science")[number % 4]
    return {
        "difficulty": None if domain == "math" else 1 + number % 10,
        "source": "demo",
        "domain": domain,
        "conversations": [
            {"from": "human", "value": exchange.asked},
            {"from": "gpt", "value": f"<think>{exchange.thinking}</think>{exchange.answer}"},
        ],
    }


def b6_ultrachat(talk: Dialogue, _number: int) -> Row:
    """``prompt`` repeats the first message."""
    messages = _turns(talk, "role", "content", "user", "assistant")
    prompt = messages[0]["content"]
    return {"prompt": prompt, "prompt_id": _hash(prompt), "messages": messages}


def b7_sharegpt(talk: Dialogue, number: int) -> Row:
    turns = _turns(talk, "from", "value", "human", "gpt")
    return {"id": f"demo{number // 2:03d}_{number % 2}", "conversations": turns}


def b8_sweagent(talk: Dialogue, number: int) -> Row:
    """A trajectory; the system turn keeps its text in ``system_prompt``."""

    def step(role: str, text: str | None = None, system: str | None = None) -> Row:
        cutoff = "01.01.2023" if system else None
        return {
            "cutoff_date": cutoff,
            "mask": False,
            "role": role,
            "system_prompt": system,
            "text": text,
        }

    turns = _turns(talk, "role", "text", "user", "ai")
    resolved = number % 6 == 0
    return {
        "instance_id": f"demo__links-{number // 4}",
        "model_name": "demo-agent-70b",
        "target": resolved,
        "trajectory": [step("system", system=talk.system), *(step(**turn) for turn in turns)],
        "exit_status": "submitted" if number % 5 else "early_exit",
        "generated_patch": f"+{turns[-1]['text']}\n" if resolved else "",
        "eval_logs": "",
    }


def _turns(talk: Dialogue, who: str, what: str, user: str, assistant: str) -> list[dict[str, str]]:
    """The whole conversation as turns of two keys and two roles."""
    turns = []
    for exchange in talk.exchanges:
        turns.append({who: user, what: exchange.asked})
        turns.append({who: assistant, what: exchange.answer})
    return turns


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


WRITERS: dict[str, Callable[[Dialogue, int], Row]] = {
    "B1_glaive": b1_glaive,
    "B2_opencodeinstruct": b2_opencodeinstruct,
    "B3_magicoder": b3_magicoder,
    "B4_mixturethoughts": b4_mixturethoughts,
    "B5_openthoughts": b5_openthoughts,
    "B6_ultrachat": b6_ultrachat,
    "B7_sharegpt": b7_sharegpt,
    "B8_sweagent": b8_sweagent,
}


def rows(dataset: str) -> list[Row]:
    """All rows of one file, faults included. Same rows on every call."""
    rng = Random(f"{SEED} {dataset}")
    clean = [WRITERS[dataset](dialogue(dataset, rng), number) for number in range(NUM_ROWS)]
    return faults.add(dataset, clean)


def file_name(dataset: str) -> str:
    """ShareGPT comes as one JSON array, the others as JSON lines."""
    return f"{dataset}.json" if dataset == "B7_sharegpt" else f"{dataset}.jsonl"


def text(dataset: str) -> str:
    """Content of one file."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows(dataset)]
    if dataset == "B7_sharegpt":
        return "[\n" + ",\n".join(lines) + "\n]\n"
    return "\n".join(lines) + "\n"


def main() -> None:
    PROMPTS.mkdir(exist_ok=True)
    for dataset in DATASETS:
        (PROMPTS / file_name(dataset)).write_text(text(dataset), encoding="utf-8")


if __name__ == "__main__":
    main()
