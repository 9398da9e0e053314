"""``drafter COMMAND``: the parser, made of the groups in :mod:`drafter.commands`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NoReturn

from drafter.commands import (
    engine,
    interchange,
    jobs,
    pilot,
    planning,
    responses,
    served,
    state,
)
from drafter.errors import RecipeError

GROUPS = (jobs, planning, state, responses, pilot, engine, interchange, served)


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


class _Parser(argparse.ArgumentParser):
    """A wrong command line is a user error like any other: argparse's own exit 2 means nothing to
    the scheduler."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}: see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="drafter", description="Prompts to a drafter: the commands on the GPU host."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        sub.add_argument("--workspace", default=os.environ.get("DRAFTER_WORKSPACE"))
        return sub

    for group in GROUPS:
        group.add_to(add)
    return parser
