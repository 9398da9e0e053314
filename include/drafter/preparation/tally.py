"""Where the rows of a dataset went: prompts, or dropped for a reason; none vanishes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """source_rows = prompts + sum(dropped), once prepare has ended."""

    source_rows: int = 0
    prompts: int = 0
    shortened: int = 0
    """Of ``prompts``, above the cap of tokens before."""
    adopted: int = 0
    """Prompts that were there already, of an older run."""
    dropped: Counter[str] = field(default_factory=Counter)

    def story(self) -> str:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped.items()))
        adopted = f", {self.adopted} adopted" if self.adopted else ""
        shortened = f", {self.shortened} shortened" if self.shortened else ""
        return (
            f"{self.prompts} prompts of {self.source_rows} rows"
            f" ({reasons or 'none dropped'}){shortened}{adopted}"
        )
