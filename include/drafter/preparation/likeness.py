"""When two prompts count as one: hashes of their content, whole and without case and white space.

The whole one is :func:`drafter.files.digest` of the content, what sample ids are made of. Millions
of rows are hashed, nearly all of them plain text messages: those go a faster way to the same bytes.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import orjson

from drafter.files import digest
from drafter.sources.prompt import folded, mapped

Content = dict[str, Any]
"""{messages, tools} of a prompt."""

# To a space what str.split takes for white space, capitals to small letters; other bytes stay.
_FOLD = bytes(ord(" ") if i < 128 and chr(i).isspace() else i for i in range(256)).lower()
_has_two_spaces = re.compile(rb"  ").search


def hashes(content: Content) -> tuple[bytes, bytes]:
    """(sha256 of ``content`` as canonical JSON, its likeness).

    The likeness is equal for contents that differ in case or in the amount of white space only.
    """
    texts: list[str] = []
    for message in content["messages"]:
        text = message.get("content")
        if len(message) != 2 or type(text) is not str:
            break
        texts += (message["role"], text)
    else:
        if content["tools"] is None:
            # Of strings alone, orjson's text is Python's own.
            whole = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
            # White space around every NUL: what stands at the ends of a message then counts for
            # nothing either. No text of ours holds a NUL.
            near = _folded(" \0 ".join(texts))
            return hashlib.sha256(whole).digest(), hashlib.sha256(near).digest()
    return bytes.fromhex(digest(content)), bytes.fromhex(digest(mapped(content, folded)))


def _folded(text: str) -> bytes:
    """:func:`drafter.sources.prompt.folded`, several times as fast for what is ASCII."""
    if not text.isascii():
        return folded(text).encode()
    plain = text.encode().translate(_FOLD)
    return b" ".join(plain.split()) if _has_two_spaces(plain) else plain.strip()
