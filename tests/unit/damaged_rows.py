"""Rows damaged by hand, each with the reason it is rejected for; odd ones that are accepted.

They are of a tiny target of Kimi's family, so that tool calls are read as in production.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from unit.kimi_dataset import World, line

Wrong = Callable[[World], Any]
"""From the dataset to a row, or to the bytes of a line."""


def without(key: str) -> Wrong:
    return lambda w: {k: v for k, v in w.row().items() if k != key}


def renamed(old: str, new: str) -> Wrong:
    return lambda w: {new if k == old else k: v for k, v in w.row().items()}


def set_to(key: str, value: Any) -> Wrong:
    return lambda w: {**w.row(), key: value}


def replaced(old: bytes, new: bytes) -> Wrong:
    return lambda w: line(w.row()).replace(old, new)


def older(**row: Any) -> Wrong:
    return lambda _: {"sample_id": "b", **row}


def text(said: str, finish: str = "stop") -> Wrong:
    return lambda w: w.row(said, finish_reason=finish)


def with_ids(change: Callable[[list[int]], list[Any]]) -> Wrong:
    return lambda w: w.of(change(w.ids("Hm.</think>Three metres.<|im_end|>")))


SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
GOOD_CALL = f"{SECTION}{BEGIN}functions.tide:0{ARGUMENTS}{{}}{END}{SECTION_END}"

LINES: dict[str, tuple[Wrong, str]] = {
    "no JSON": (lambda _: b"rm: cannot remove\n", "damaged line"),
    "a row cut in the middle": (lambda w: line(w.row())[:40] + b"\n", "damaged line"),
    "a row without its beginning": (lambda w: line(w.row())[30:], "damaged line"),
    "an empty line": (lambda _: b"\n", "damaged line"),
    "blanks": (lambda _: b"  \t\n", "damaged line"),
    "NUL bytes of a lost block": (lambda _: bytes(64) + b"\n", "damaged line"),
    "two rows in one line": (lambda w: line(w.row())[:-1] + line(w.row()), "damaged line"),
    "no UTF-8": (replaced(b'"b"', b'"\xff\xfe"'), "damaged line"),
    "half a surrogate pair": (replaced(b'"b"', b'"\\ud800"'), "damaged line"),
    "a byte order mark": (lambda w: b"\xef\xbb\xbf" + line(w.row()), "damaged line"),
    "as Python prints it": (lambda w: repr(w.row()).encode() + b"\n", "damaged line"),
    "a trailing comma": (replaced(b"}\n", b",}\n"), "damaged line"),
    "NaN among the counts": (
        replaced(b'"completion_tokens":', b'"completion_tokens":NaN,"x":'),
        "damaged line",
    ),
    "an id with a leading zero": (
        replaced(b'"output_ids":[', b'"output_ids":[007,'),
        "damaged line",
    ),
    "a hole between ids": (replaced(b'"output_ids":[', b'"output_ids":[,'), "damaged line"),
    "a thousand lists in each other": (
        replaced(b'"output_ids":[', b'"output_ids":[' + b"[" * 1000 + b"]" * 1000 + b","),
        "damaged line: line 2, more than 200 lists and objects in each other",
    ),
    "a list": (lambda w: line([w.row()]), "damaged line"),
    "a string": (lambda _: line("b"), "damaged line"),
    "null": (lambda _: line(None), "damaged line"),
    "a number": (lambda _: line(7), "damaged line"),
}
FIELDS: dict[str, tuple[Wrong, str]] = {
    "nothing in it": (lambda _: {}, "wrong keys"),
    **{
        f"no {key}": (without(key), "wrong keys")
        for key in (
            "sample_id",
            "output_ids",
            "prompt_tokens",
            "completion_tokens",
            "finish_reason",
        )
    },
    "one key more": (lambda w: {**w.row(), "text": "Hm."}, "wrong keys"),
    "a key in capitals": (renamed("finish_reason", "Finish_Reason"), "wrong keys"),
    "many keys more": (
        lambda w: {**w.row(), **dict.fromkeys(map(str, range(10**4)))},
        "wrong keys: [] missing, ['0', '1', '10',",
    ),
    "the same key twice": (
        replaced(b'"prompt_tokens"', b'"prompt_tokens":1,"prompt_tokens"'),
        "key twice",
    ),
    "ids twice": (replaced(b'"output_ids"', b'"output_ids":[1],"output_ids"'), "key twice"),
    "a key twice, first for a thousand objects in each other": (
        replaced(
            b'"finish_reason"',
            b'"finish_reason":' + b'{"type":' * 1000 + b"1" + b"}" * 1000 + b',"finish_reason"',
        ),
        "key twice",
    ),
    "a number as sample id": (
        set_to("sample_id", 7),
        "wrong type of sample_id: int, needs str (a row number)",
    ),
    "no sample id": (set_to("sample_id", None), "wrong type of sample_id"),
    "an empty sample id": (set_to("sample_id", ""), "empty sample_id"),
    "a sample id of another dataset": (set_to("sample_id", "B9-1"), "unknown sample_id"),
    "a sample id with a blank": (set_to("sample_id", "b "), "unknown sample_id"),
    "null for ids": (set_to("output_ids", None), "wrong type of output_ids"),
    "no ids": (lambda w: w.of([]), "empty output_ids"),
    "a bool for a count": (set_to("prompt_tokens", True), "wrong type of prompt_tokens"),
    "null for a count": (set_to("completion_tokens", None), "wrong type of completion_tokens"),
    "a huge count": (set_to("completion_tokens", 2**63), "wrong completion_tokens"),
    "a count below zero": (set_to("prompt_tokens", -1), "wrong prompt_tokens: -1"),
    "no prompt": (set_to("prompt_tokens", 0), "wrong prompt_tokens"),
    "a prompt one longer": (
        lambda w: w.row(prompt_tokens=len(w.prompt) + 1),
        "wrong prompt_tokens",
    ),
    "ids counted wrong": (set_to("completion_tokens", 5), "wrong completion_tokens"),
    "the prompt counted along": (
        lambda w: w.row(completion_tokens=len(w.prompt) + len(w.row()["output_ids"])),
        "wrong completion_tokens",
    ),
    "null for the end": (set_to("finish_reason", None), "wrong type of finish_reason"),
    "no word for the end": (set_to("finish_reason", ""), "unknown finish_reason"),
    "aborted": (set_to("finish_reason", "abort"), "unknown finish_reason: 'abort'"),
    "an error for an end": (set_to("finish_reason", "error"), "unknown finish_reason"),
}
IDS: dict[str, tuple[Wrong, str]] = {
    "an id too large": (with_ids(lambda ids: [10**5, *ids]), "id outside the vocabulary: 100000"),
    "one beyond the last": (lambda w: w.of([w.family.vocab_size, 9]), "id outside the vocabulary"),
    "an id below zero": (with_ids(lambda ids: [-1, *ids]), "id outside the vocabulary: -1"),
    "an id of 33 bits": (with_ids(lambda ids: [2**32 + 7, *ids]), "id outside the vocabulary"),
    "an id of 65 bits": (
        replaced(b'"output_ids":[', b'"output_ids":[36893488147419103232,'),
        "wrong type in output_ids",
    ),
    "a fraction": (
        with_ids(lambda ids: [*ids[:-1], 7.0, ids[-1]]),
        "wrong type in output_ids: 7.0",
    ),
    "an exponent": (replaced(b'"output_ids":[', b'"output_ids":[1e1,'), "wrong type in output_ids"),
    "null among ids": (with_ids(lambda ids: [None, *ids]), "wrong type in output_ids"),
    "a bool among ids": (with_ids(lambda ids: [True, *ids]), "wrong type in output_ids: True"),
    "text among ids": (with_ids(lambda ids: ["7", *ids]), "wrong type in output_ids: '7'"),
}
DRIFT: dict[str, tuple[Wrong, str]] = {
    "text under output_ids": (
        set_to("output_ids", "Hm.</think>Three."),
        "wrong type of output_ids: str, needs list (text instead of ids, </think> spelled out in",
    ),
    "ids as text": (
        set_to("output_ids", "[1, 2, 3]"),
        "wrong type of output_ids: str, needs list (ids as",
    ),
    "base64": (
        set_to("output_ids", "AQIDBAUGBwg="),
        "wrong type of output_ids: str, needs list (base64)",
    ),
    "ids by position": (set_to("output_ids", {"0": 5, "1": 6}), "wrong type of output_ids: dict"),
    "pieces of text": (with_ids(lambda _: ["H", "m", "."]), "wrong type in output_ids: 'H' is str"),
    "a batch of one": (with_ids(lambda ids: [ids]), "wrong type in output_ids"),
    "ids with probabilities": (
        with_ids(lambda ids: [[-0.1, i, None] for i in ids]),
        "wrong type in",
    ),
    "prompt before output": (
        lambda w: w.of([*w.prompt, *w.row()["output_ids"]]),
        "prompt in output_ids",
    ),
    "ids under prompt_tokens": (
        set_to("prompt_tokens", [5, 6]),
        "wrong type of prompt_tokens: list, needs int (2 ids instead of their number)",
    ),
    "counts as text": (set_to("completion_tokens", "17"), "wrong type of completion_tokens: str"),
    "counts as fractions": (
        set_to("completion_tokens", 17.0),
        "wrong type of completion_tokens: float",
    ),
    "an engine's end": (
        set_to("finish_reason", {"type": "stop", "matched": 5}),
        "wrong type of finish_reason: dict, needs str (as an engine says it, type 'stop')",
    ),
    "an end by name": (set_to("finish_reason", "tool_calls"), "unknown finish_reason"),
    "an end of another engine": (set_to("finish_reason", "eos_token"), "unknown finish_reason"),
}
OLDER: dict[str, tuple[Wrong, str]] = {
    "text": (
        older(response="Hm.", prompt_tokens=7),
        "older format: text instead of ids (response)",
    ),
    "text with thinking in it": (
        older(response="Hm.</think>3 m."),
        "older format: text instead of ids (response, </think> spelled out in it)",
    ),
    "thinking in the answer": (
        older(reasoning_content=None, content="Hm.</think>3 m."),
        "older format: a chat reply whose thinking sits in the answer",
    ),
    "a chat reply": (
        older(reasoning_content="Hm.", content="3 m."),
        "older format: a chat reply (",
    ),
    "a chat reply without thinking": (
        older(reasoning_content="", content="3 m."),
        "older format: a chat reply without its thinking",
    ),
    "a whole chat reply": (
        older(choices=[{"message": {}}]),
        "older format: a whole reply of a chat",
    ),
    "an engine's reply": (
        older(text="Hm.", meta_info={}),
        "older format: a whole reply of an engine",
    ),
    "an engine's reply with ids": (
        older(output_ids=[5], meta_info={}),
        "older format: a whole reply of an engine (output_ids beside meta_info)",
    ),
    "a conversation": (older(messages=[]), "older format: a conversation as text (messages)"),
    "turns": (older(conversations=[]), "older format: a conversation as text (conversations)"),
    "a tokenized row": (
        older(input_ids=[1], prompt_tokens=1),
        "older format: prompt and response in one (input_ids, prompt_tokens)",
    ),
    "a row to train on": (older(input_ids=[1], loss_mask=[0]), "older format: prompt and response"),
    "ids under another name": (
        renamed("output_ids", "token_ids"),
        "older format: ids under another",
    ),
    "output tokens": (
        renamed("output_ids", "output_tokens"),
        "older format: ids under another name",
    ),
}
CONTENT: dict[str, tuple[Wrong, str]] = {
    "thinking spelled out": (
        lambda w: w.of([*w.ids("Hm.</th"), *w.ids("ink>3 m."), *w.ids("<|im_end|>")]),
        "thinking as text",
    ),
    "thinking spelled out, its stop id lost": (
        lambda w: w.of([*w.ids("Hm.</th"), *w.ids("ink>3 m.")]),
        "thinking as text",
    ),
    "thinking spelled out and cut": (
        lambda w: w.of([*w.ids("Hm.<"), *w.ids("/think>3 m.")], finish_reason="length"),
        "thinking as text",
    ),
    "thinking spelled out before a call": (
        lambda w: w.of(
            [*w.ids("Hm.</"), *w.ids("think>So."), *w.ids(GOOD_CALL), *w.ids("<|im_end|>")]
        ),
        "thinking as text",
    ),
    "no thinking, its stop id lost": (text("Three metres."), "unclosed"),
    "no end of thinking": (text("Hm. Three metres.<|im_end|>"), "unclosed"),
    "only a stop": (text("<|im_end|>"), "unclosed"),
    "no thought": (text("</think>Three metres.<|im_end|>"), "empty thinking"),
    "a blank thought": (text(" \n\n</think>Three metres.<|im_end|>"), "empty thinking"),
    "thinking opened, nothing thought": (text("<think>\n</think>3 m.<|im_end|>"), "empty thinking"),
    "thinking behind an empty thought": (
        text("</think>Hm.</think>Three metres.<|im_end|>"),
        "empty thinking",
    ),
    "cut in its thinking": (text("Hm. Let me", "length"), "truncated in thinking"),
    "no answer": (text("Hm.</think><|im_end|>"), "no answer"),
    "a blank answer": (text("Hm.</think> \n<|im_end|>"), "no answer"),
    "no stop id": (text("Hm.</think>Three metres."), "no stop id"),
    "closed twice": (text("Hm.</think>So.</think>3 m.<|im_end|>"), "several closes: 2"),
    "stopped in the middle": (
        text("Hm.</think>Three.<|im_end|>Four.<|im_end|>"),
        "control token out of place",
    ),
    "a user's turn": (
        text("Hm.</think>3 m.<|im_user|>user<|im_middle|>And?<|im_end|>"),
        "control token out of place",
    ),
    "a document's begin": (text("[BOS]Hm.</think>Three.<|im_end|>"), "control token out of place"),
    "thinking opened in the answer": (
        text("Hm.</think><think>3 m.<|im_end|>"),
        "control token out of",
    ),
    "an end of a call in the thinking": (
        text(f"Hm.{END}</think>Three metres.<|im_end|>"),
        "control token out of place",
    ),
    "padding": (text("Hm.</think>3 m.<|im_end|>[PAD]", "length"), "control token out of place"),
    "a call without an end": (
        text(f"Hm.</think>{SECTION}{BEGIN}functions.tide:0{ARGUMENTS}{{}}<|im_end|>"),
        "tool call not closed",
    ),
    "a section without an end": (
        text(f"Hm.</think>{GOOD_CALL.replace(SECTION_END, '')}<|im_end|>"),
        "tool call unbalanced",
    ),
    "a call outside a section": (
        text(f"Hm.</think>{GOOD_CALL.replace(SECTION, '')}<|im_end|>"),
        "tool call unbalanced",
    ),
    "an end without a call": (text(f"Hm.</think>3 m.{END}<|im_end|>"), "tool call unbalanced"),
    "an empty section": (
        text(f"Hm.</think>{SECTION}{SECTION_END}<|im_end|>"),
        "tool call unbalanced",
    ),
    "arguments cut": (
        text(f"Hm.</think>{GOOD_CALL.replace('{}', '{')}<|im_end|>"),
        "tool call unparsable: functions.tide:0{",
    ),
    "arguments in single quotes": (
        text("Hm.</think>" + GOOD_CALL.replace("{}", "{'port': 1}") + "<|im_end|>"),
        "tool call unparsable",
    ),
    "a call without its number": (
        text(f"Hm.</think>{GOOD_CALL.replace(':0', '')}<|im_end|>"),
        "tool call unparsable",
    ),
    "cut in a call": (
        text(f"Hm.</think>{SECTION}{BEGIN}functions.ti", "length"),
        "cut by length in a tool call",
    ),
    "cut in a call in its thinking": (
        text(f"Hm.{SECTION}{BEGIN}functions.ti", "length"),
        "cut by length in a tool call",
    ),
    "one word for ever": (text("Hm.</think>" + "so " * 200, "length"), "repetition: "),
    "one sentence for ever": (
        text("Hm." + " Wait, let me think about it once more." * 40 + "</think>3 m.<|im_end|>"),
        "repetition: ",
    ),
}
REJECTED = {**LINES, **FIELDS, **IDS, **DRIFT, **OLDER, **CONTENT}
ACCEPTED: dict[str, tuple[Wrong, str, str]] = {
    "as it should be": (lambda w: w.row(), "accepted", "closed"),
    "written by another program": (
        lambda w: json.dumps(w.row(), indent=None).encode() + b"\n",
        "accepted",
        "closed",
    ),
    "its keys in another order": (lambda w: dict(reversed(w.row().items())), "accepted", "closed"),
    "thinking opened again": (text("<think>Hm.</think>3 m.<|im_end|>"), "accepted", "closed"),
    "a call": (text(f"Hm.</think>{GOOD_CALL}<|im_end|>"), "accepted", "closed"),
    "a call that leaves thinking": (
        text(f"Hm.{GOOD_CALL}<|im_end|>"),
        "flagged",
        "tool in thinking",
    ),
    "a call that leaves thinking, with its end among the arguments": (
        lambda w: w.of(
            [
                *w.ids(f"Hm.{SECTION}{BEGIN}functions.tide:0{ARGUMENTS}"),
                *w.ids('{"port":"</'),
                *w.ids('think>"}'),
                *w.ids(f"{END}{SECTION_END}<|im_end|>"),
            ]
        ),
        "flagged",
        "tool in thinking",
    ),
    "a tool that nobody offers": (
        text("Hm.</think>" + GOOD_CALL.replace("tide", "moon") + "<|im_end|>"),
        "flagged",
        "tool not declared: moon",
    ),
    "cut in its answer": (text("Hm.</think>Three", "length"), "flagged", "cut by length"),
    "cut before its answer": (text("Hm.</think>", "length"), "flagged", "cut by length"),
}
