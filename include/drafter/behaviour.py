"""What a tokenizer does, so that a change of it between generation and validation is seen.

Files alone do not say it: another version of the software that reads them may cut text elsewhere,
or render a template differently. So a fixed set of texts and conversations is put through the
tokenizer, and what came of each is kept beside the responses (sessions.jsonl), with the hash of
each file and the versions. A difference is refused by name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypedDict

from drafter import rewrite, template
from drafter.errors import DataError, RecipeError
from drafter.identity import tokenizer_files, tokenizer_software
from drafter.layout import Prepared
from drafter.sources.functions import tool_call
from drafter.sources.prompt import Prompt

TEXTS = {
    "words": "The quick brown fox jumps over the lazy dog; it's what foxes don't do, SHE said.",
    "white space": " a  b\tc\n\n\nd \r\n  e\u00a0f\u3000g\n",
    "indentation": "def f(x):\n    if x:\n\t\treturn [1,\n            2]\n" + " " * 33 + "#",
    "numbers": "0 7 42 007 3.14159 1,000,000 1e-9 0x1F 2024-02-29 12:34:56 123456789012",
    "code": 'for (int i = 0; i != n; ++i) { s += "\\n" + a[i]->b::c; } // <T&&> $x ~ `y`',
    "JSON": '{"name": "tide", "arguments": {"port": "St. Ives", "at": [1, 2.5, null]}}',
    "LaTeX": r"\frac{\partial u}{\partial t} = \alpha \nabla^2 u, \quad x \in \mathbb{R}^n",
    "Latin": "Straße, cœur, İstanbul, naïve, Ångström, ﬁn, ½ ² №",
    "combining": "e\u0301 \u00e9 n\u0303 \u1e9b\u0323 \u0041\u030a",
    "Chinese": "你好，世界。今天天气很好，我们去散步吧！",
    "Japanese and Korean": "吾輩は猫である。ﾊﾝｶｸ 안녕하세요",
    "right to left": "مرحبا بالعالم שלום עולם",
    "Cyrillic, Greek, Devanagari": "Съешь ещё этих мягких булок. Ξεσκεπάζω नमस्ते दुनिया",
    "emoji": "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ☃️ 𝒳",
    "rare characters": "\ufeff\u200b\u200d\u00ad\ufffd\ue000\u0007\u001b[0m\u2028",
    "long runs": "a" * 70 + "=" * 70 + "\n" * 9 + "ab" * 40,
    "control strings": "<think>x</think> <|im_end|><|im_start|></s> <tool_call><|endoftext|>[EOS]",
}
"""Encoded as they are: each shows another part of a tokenizer."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "How high?",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
    },
}
_ASK = {"role": "user", "content": "How high is it at  St. Ives?\n"}
PROMPTS = {
    "one turn": Prompt([_ASK]),
    "typed control strings": Prompt([{"role": "user", "content": TEXTS["control strings"]}]),
    "history": Prompt(
        [
            {"role": "system", "content": "Be brief."},
            _ASK,
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3 m."},
            {"role": "user", "content": "And at noon?"},
        ]
    ),
    "tools": Prompt([_ASK], [_TOOL]),
    "tool call": Prompt(
        [
            _ASK,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [tool_call("tide", '{"port":"St. Ives"}', 0)],
            },
            {"role": "tool", "tool_call_id": "functions.tide:0", "content": '{"m": 3}'},
        ],
        [_TOOL],
    ),
}
"""Rendered with thinking on and off."""

_SHORT = 16
_NAMED = 5
"""Changes that a sentence names; the rest is a count."""


class Fingerprint(TypedDict):
    """A tokenizer as it was at one time."""

    files: dict[str, str]
    """name -> sha256."""

    behaviour: dict[str, str]
    """Probe -> hash of ids, and of the text they decode to."""

    software: dict[str, str]
    """package -> version."""


def fingerprint(target: Path, tokenizer: Any) -> Fingerprint:
    """Of the tokenizer that was loaded from ``target``."""
    probes = {
        f"text {name!r}": _hash(tokenizer, template.encode(tokenizer, text))
        for name, text in TEXTS.items()
    }
    for name, prompt in PROMPTS.items():
        for thinking in (True, False):
            probe = f"prompt {name!r}, thinking {'on' if thinking else 'off'}"
            probes[probe] = _rendered(tokenizer, prompt, thinking)
    return {
        "files": tokenizer_files(target),
        "behaviour": probes,
        "software": tokenizer_software(),
    }


def refuse_change(prepared: Prepared, now: Fingerprint) -> None:
    """RecipeError naming what changed since the stored responses were generated. Rows of sessions
    that did not note their tokenizer are left to sessions.py, which knows its files' hash."""
    if not prepared.responses.exists() or prepared.responses.stat().st_size == 0:
        return
    before: Fingerprint | None = None
    for event in rewrite.events(prepared):
        before = event.row.get("tokenizer", before)
    changed = changes(before, now) if before else []
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise RecipeError(
            f"{prepared.responses} was generated with a tokenizer that has changed since"
            f" ({'; '.join(changed[:_NAMED])}{more}): bring that back, use another host.workspace,"
            " or trigger generate with mode restart for this dataset"
        )


def changes(before: Fingerprint, now: Fingerprint) -> list[str]:
    """What differs, in words; empty when the tokenizer is the same. Other software that does the
    same is no difference; it is named beside one."""
    files = _differences("file", before["files"], now["files"])
    probes = _differences("probe", before["behaviour"], now["behaviour"])
    software = _differences("software", before["software"], now["software"])
    return [*files, *software, *probes] if files or probes else []


def _differences(what: str, before: dict[str, str], now: dict[str, str]) -> list[str]:
    def said(name: str) -> str:
        if what == "software":
            return f"{name} was {before.get(name, 'missing')} and is {now.get(name, 'missing')}"
        if name not in now:
            return f"{what} {name} is gone"
        return f"{what} {name} {'differs' if name in before else 'is new'}"

    return [said(name) for name in sorted(before.keys() | now) if before.get(name) != now.get(name)]


def _rendered(tokenizer: Any, prompt: Prompt, thinking: bool) -> str:
    try:
        return _hash(tokenizer, template.render(tokenizer, prompt, thinking))
    # A template that cannot render tools or histories says so in its own way.
    except (DataError, TypeError, ValueError) as error:
        return f"refused: {type(error).__name__}"


def _hash(tokenizer: Any, ids: list[int]) -> str:
    text = f"{ids} {template.decode(tokenizer, ids)}"
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_SHORT]
