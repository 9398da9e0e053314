"""The functions that a conversation may call and the calls in it, in the one form templates know.

Sources declare functions bare or as ``{"type": "function", "function": {..}}``, parsed or as JSON
text, one by one or as a list. Calls carry their arguments as JSON text of an object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson

from drafter.sources.prompt import clean, mapped, parsed

NOT_JSON = "functions are not JSON"
NO_NAME = "function without a name"


def declared(value: Any) -> list[dict[str, Any]] | str:
    """The ``tools`` of a source's column, a list or JSON text of one, or what is wrong with it."""
    try:
        functions = parsed(value) if isinstance(value, str) and value.strip() else value or []
        if not isinstance(functions, list):
            return NOT_JSON
        functions = [parsed(f) if isinstance(f, str) else f for f in functions]
    except ValueError:
        return NOT_JSON
    tools: list[dict[str, Any]] = []
    for function in functions:
        tool = declaration(function)
        if isinstance(tool, str):
            return tool
        tools.append(tool)
    return tools


def declaration(function: Any) -> dict[str, Any] | str:
    """One entry of ``tools``, or what is wrong with ``function``.

    Templates walk ``parameters.properties``; some functions leave out one or the other. Column
    stores give every function the keys of all others, as null: null says nothing in a schema.
    """
    try:
        function = _without_nulls(mapped(function, clean))
    except RecursionError:
        return NOT_JSON
    if isinstance(function, dict) and isinstance(function.get("function"), dict):
        function = function["function"]
    if not isinstance(function, dict):
        return NOT_JSON
    if not isinstance(function.get("name"), str) or not function["name"]:
        return NO_NAME
    given = function.get("parameters")
    parameters = dict(given) if isinstance(given, dict) else {}
    if not isinstance(parameters.get("properties"), dict):
        parameters["properties"] = {}
    if not isinstance(parameters.get("type"), str):
        parameters["type"] = "object"
    tool = {"type": "function", "function": {**function, "parameters": parameters}}
    try:
        # As deep as in a row of prompts.jsonl: what cannot be written there is no declaration.
        written: dict[str, Any] = orjson.loads(orjson.dumps({"tools": [tool]}))["tools"][0]
    except (ValueError, TypeError):
        return NOT_JSON
    return written


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def tool_call(name: str, arguments: str, index: int) -> dict[str, Any]:
    """One entry of ``tool_calls``; ``arguments`` is JSON text, ``index`` counts over the prompt.

    The id has the form that Kimi writes and expects; other forms make it write malformed calls.
    """
    function = {"name": name, "arguments": arguments}
    return {"id": f"functions.{name}:{index}", "type": "function", "function": function}


def arguments_of(value: Any, change: Callable[[str], str] = clean) -> str | None:
    """JSON text of a call's arguments with ``change`` done to their strings; None if no object.

    JSON text that needs no change stays as it was written; nothing at all is an empty object.
    """
    text = clean(value).strip() if isinstance(value, str) else ""
    try:
        given = parsed(text) if text else None if isinstance(value, str) else value
        read = mapped({} if given is None else given, change)
        written = json.dumps(read, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(read, dict):
        return None
    return text if text and read == given else written
