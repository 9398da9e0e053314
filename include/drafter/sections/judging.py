"""What becomes of answers."""

from __future__ import annotations

from pydantic import Field, field_validator

from drafter.kinds import KINDS, SOUND, Kind, Policy
from drafter.sections.section import Section, Share


class Repetition(Section):
    """From when on an answer that goes round in a loop counts as one."""

    min_share: float = Field(default=0.25, gt=0, le=1)
    """Of the answer that the loop covers, three rounds at least."""

    min_tokens: int = Field(default=96, ge=24)
    """Shorter loops are tables and laughter."""


class Validate(Section):
    """What becomes of rows by class; drafter.kinds names the classes and says what they mean."""

    policy: dict[Kind, Policy] = Field(default={}, validate_default=True)
    """What becomes of a class of rows, where it is not the default: "accept", "flag" (accepted, and
    counted) or "reject"."""

    cap: dict[Kind, Share] = Field(default={}, validate_default=True)
    """Share of stored rows that a class may have, where it is not the default (one row may be of
    any class, unless its cap is 0). Above it the phase fails with the numbers."""

    max_rejected_share: Share = 0.2
    """The same for all rejected rows together."""

    repetition: Repetition = Repetition()

    audit_rows: int = Field(default=24, ge=0, le=1000)
    """Rows per dataset that the report decodes for reading."""

    @field_validator("policy")
    @classmethod
    def _every_policy(cls, policy: dict[Kind, Policy]) -> dict[Kind, Policy]:
        """The resolved recipe says all of them: a changed default is a changed rule."""
        defaults = {kind: about.policy for kind, about in KINDS.items() if about.policy}
        if fixed := policy.keys() - defaults:
            raise ValueError(f"nothing can be chosen for {', '.join(sorted(fixed))}: leave it out")
        return {**defaults, **policy}

    @field_validator("cap")
    @classmethod
    def _every_cap(cls, cap: dict[Kind, float]) -> dict[Kind, float]:
        return {**{kind: about.cap for kind, about in KINDS.items()}, **cap}

    def policy_of(self, kind: Kind) -> Policy:
        """Of any class: those without a choice are sound, or never accepted."""
        return self.policy.get(kind, "accept" if kind in SOUND else "reject")

    def cap_of(self, kind: Kind) -> float | None:
        """None when every row may be of this class."""
        cap = self.cap[kind]
        return cap if cap < 1 else None
