"""The sections of a recipe: every knob once, with its unit, its bound and its reason.

Each class is a table of ``include/recipes/<name>.toml``; drafter.recipe puts them together.
"""

from drafter.sections.generation import Dataset, Engine, Generate, Name, Pilot, SourceFormat, Target
from drafter.sections.judging import Repetition, Validate
from drafter.sections.running import Alerts, Host, Schedule
from drafter.sections.section import Section
from drafter.sections.training import Evaluate, Extract, Train

__all__ = [
    "Alerts",
    "Dataset",
    "Engine",
    "Evaluate",
    "Extract",
    "Generate",
    "Host",
    "Name",
    "Pilot",
    "Repetition",
    "Schedule",
    "Section",
    "SourceFormat",
    "Target",
    "Train",
    "Validate",
]
