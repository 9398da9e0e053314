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


def content_hash(content: Content) -> bytes:
    """sha256 of ``content`` as canonical JSON."""
    if not _is_plain(content):
        return bytes.fromhex(digest(content))
    # Of strings alone, orjson's text is Python's own.
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).digest()


def near_hash(content: Content) -> bytes:
    """Equal for contents that differ in case or in the amount of white space only."""
    if not _is_plain(content):
        return bytes.fromhex(digest(mapped(content, folded)))
    # White space around every NUL: what stands at the ends of a message then counts for nothing
    # either. No text of ours holds a NUL.
    text = " \0 ".join([text for m in content["messages"] for text in (m["role"], m["content"])])
    return hashlib.sha256(_folded(text)).digest()


def _is_plain(content: Content) -> bool:
    if content["tools"] is not None:
        return False
    for message in content["messages"]:
        if len(message) != 2 or type(message.get("content")) is not str:
            return False
    return True


def _folded(text: str) -> bytes:
    """:func:`drafter.sources.prompt.folded`, several times as fast for what is ASCII."""
    if not text.isascii():
        return folded(text).encode()
    plain = text.encode().translate(_FOLD)
    return b" ".join(plain.split()) if _has_two_spaces(plain) else plain.strip()
