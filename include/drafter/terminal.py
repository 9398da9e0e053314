"""Text for a person's terminal: foreign bytes inert, long text elided, colours only where wanted.

Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import IO, Literal

Style = Literal["bold", "dim", "red", "green", "yellow", "magenta", "cyan"]
Paint = Callable[[str, Style], str]

_CODES: dict[Style, int] = {
    "bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "magenta": 35, "cyan": 36,
}  # fmt: skip

# Controls but tab and line end, what reorders or hides text, and halves of surrogate pairs.
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def inert(text: str) -> str:
    """``text`` with everything a terminal would act on shown as an escape: ``\\x1b``."""
    return _ACTIVE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Inert, line ends and tabs too."""
    return inert(text).replace("\n", "\\n").replace("\t", "\\t")


def elide(text: str, limit: int | None) -> str:
    """``text`` without its middle, and how much that was, when it is longer than ``limit``."""
    if limit is None or len(text) <= limit:
        return text
    head, tail = text[: limit - limit // 3], text[len(text) - limit // 3 :]
    middle = unmark(text[len(head) : len(text) - len(tail)], str)
    return f"{head}\n[... {len(middle):,} characters ...]\n{tail}"


def clip(text: str, limit: int) -> str:
    """The beginning of a name that is longer than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def mark(text: str) -> str:
    """Inert ``text``, remembered as something to paint when it is printed."""
    return f"\x01{text}\x02"


def unmark(text: str, paint_marked: Callable[[str], str]) -> str:
    """Paint what was marked; a mark that lost its other end is painted as far as it goes."""
    painted = re.sub("\x01([^\x01\x02]+)\x02?", lambda found: paint_marked(found[1]), text)
    return re.sub("[\x01\x02]", "", painted)


def colours(stream: IO[str]) -> bool:
    """A terminal, and nobody said no (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painter(coloured: bool) -> Paint:
    if not coloured:
        return lambda text, _: text
    return lambda text, style: f"\x1b[{_CODES[style]}m{text}\x1b[0m" if text else ""


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; trailing blanks dropped."""
    everything = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in everything
    )


def duration(seconds: float) -> str:
    """``h:mm:ss``, or ``m:ss`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def utc(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
