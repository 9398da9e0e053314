"""The eight prompt sources: one module per format, each with a pure ``convert(row)``.

A converter gives a :class:`~drafter.sources.prompt.Prompt`, or a str: why the row gives none. No
row makes it raise. It looks at the module's ``COLUMNS`` and at nothing else.
"""

from collections.abc import Mapping

from drafter.sections import SourceFormat
from drafter.sources import (
    glaive,
    magicoder,
    mixturethoughts,
    opencodeinstruct,
    openthoughts,
    sharegpt,
    sweagent,
    ultrachat,
)
from drafter.sources.prompt import Converter

CONVERT: Mapping[SourceFormat, Converter] = {
    "glaive": glaive.convert,
    "opencodeinstruct": opencodeinstruct.convert,
    "magicoder": magicoder.convert,
    "mixturethoughts": mixturethoughts.convert,
    "openthoughts": openthoughts.convert,
    "ultrachat": ultrachat.convert,
    "sharegpt": sharegpt.convert,
    "sweagent": sweagent.convert,
}
"""Recipe's ``format`` -> converter."""

COLUMNS: Mapping[SourceFormat, tuple[str, ...]] = {
    "glaive": glaive.COLUMNS,
    "opencodeinstruct": opencodeinstruct.COLUMNS,
    "magicoder": magicoder.COLUMNS,
    "mixturethoughts": mixturethoughts.COLUMNS,
    "openthoughts": openthoughts.COLUMNS,
    "ultrachat": ultrachat.COLUMNS,
    "sharegpt": sharegpt.COLUMNS,
    "sweagent": sweagent.COLUMNS,
}
"""Recipe's ``format`` -> the columns that its converter looks at."""
