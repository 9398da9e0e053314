"""What a benchmark found, and the bar it is held to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Result:
    value: float
    unit: str
    bar: float
    bar_on: Literal["value", "ratio"]
    better: Literal["lower", "higher"]
    reference: float | None = None
    """The same quantity of what we compare with, measured beside ``value``."""

    @property
    def ratio(self) -> float | None:
        return None if self.reference is None else self.value / self.reference

    @property
    def passes(self) -> bool:
        judged = self.value if self.bar_on == "value" else self.ratio
        if judged is None:
            return False
        return judged <= self.bar if self.better == "lower" else judged >= self.bar

    def line(self, bench: str) -> str:
        return json.dumps(
            {
                "bench": bench,
                "value": round(self.value, 3),
                "unit": self.unit,
                "reference": self.reference,
                "ratio": self.ratio,
                "bar": self.bar,
                "bar_on": self.bar_on,
                "better": self.better,
            }
        )
