"""Rows as other programs and older runs wrote them, recognised so that none is half-read.

Two incidents stand behind it. A chat endpoint without a reasoning parser gave
``reasoning_content: null`` and put thinking, ``</think>`` and answer into ``content``: three
thousand rows of text that no key check could tell from good ones. And rows kept their keys while
what stood under them changed. Only ids that the target wrote can be trained on, so nothing here is
ever converted; it is named.
"""

from __future__ import annotations

import re
from typing import Any

_IDS_BY_ANOTHER_NAME = (
    "completion_ids",
    "generated_ids",
    "generated_token_ids",
    "ids",
    "output_token_ids",
    "output_tokens",
    "response_ids",
    "response_token_ids",
    "token_ids",
    "tokens",
)
_TEXT = ("response", "output", "completion", "generated_text", "answer", "text", "content")
_CLOSE = "</think>"
_BASE64 = re.compile(r"[A-Za-z0-9+/]{8,}={0,2}")


def older(row: dict[str, Any]) -> str | None:
    """What a row is that lacks some of our keys, or has others; None when it is nothing known."""
    if isinstance(row.get("output_ids"), list):
        return _reply(row) if "meta_info" in row else None
    if "reasoning_content" in row or "reasoning" in row:
        return _chat(row)
    if "choices" in row:
        return "a whole reply of a chat endpoint (choices), ids are not in it"
    if "meta_info" in row:
        return _reply(row)
    for key in ("messages", "conversations", "conversation"):
        if key in row:
            return f"a conversation as text ({key}), ids are not in it"
    if "input_ids" in row:
        inside = ", ".join(key for key in ("loss_mask", "prompt_tokens") if key in row)
        return f"prompt and response in one (input_ids{', ' + inside if inside else ''})"
    for key in _IDS_BY_ANOTHER_NAME:
        if isinstance(row.get(key), list):
            return f"ids under another name ({key})"
    for key in _TEXT:
        if isinstance(row.get(key), str):
            return f"text instead of ids ({key}{_thinks(row[key])})"
    return None


def drift(key: str, value: Any) -> str | None:
    """What stands under one of our keys that meant something else to whoever wrote it."""
    if key == "output_ids":
        return _drift_of_ids(value)
    if key == "finish_reason" and isinstance(value, dict):
        return f"as an engine says it, type {value.get('type')!r:.20}"
    if key in ("prompt_tokens", "completion_tokens"):
        if isinstance(value, list):
            return f"{len(value)} ids instead of their number"
        if isinstance(value, str) and value.isdecimal():
            return "a number as text"
        if isinstance(value, float) and value.is_integer():
            return "a number as a data frame with gaps writes it"
    if key == "sample_id" and type(value) is int:
        return "a row number"
    return None


def _drift_of_ids(value: Any) -> str | None:
    if isinstance(value, dict):
        return "ids by position" if all(map(str.isdecimal, value)) else None
    if not isinstance(value, str):
        return None
    if re.fullmatch(r"[\[\s]*\d+([\s,]+\d+)*[\]\s]*", value):
        return "ids as text"
    if _BASE64.fullmatch(value):
        return "base64"
    return f"text instead of ids{_thinks(value)}"


def _chat(row: dict[str, Any]) -> str:
    thought = row.get("reasoning_content", row.get("reasoning"))
    content = row.get("content")
    if not thought and isinstance(content, str) and _CLOSE in content:
        return (
            "a chat reply whose thinking sits in the answer (reasoning_content is empty, content"
            f" holds {_CLOSE})"
        )
    if not thought:
        return "a chat reply without its thinking (reasoning_content is empty)"
    return "a chat reply (reasoning_content and content are text), ids are not in it"


def _reply(row: dict[str, Any]) -> str:
    if isinstance(row.get("output_ids"), list):
        return "a whole reply of an engine (output_ids beside meta_info), counts are not beside it"
    return "a whole reply of an engine (text and meta_info), ids are not in it"


def _thinks(text: str) -> str:
    return f", {_CLOSE} spelled out in it" if _CLOSE in text else ""
