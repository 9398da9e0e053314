"""Short commands on the GPU host as tasks: deploy the code, ask something, log the answer.

Exit codes of :mod:`drafter.errors` decide about retries.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from drafter.errors import MEANING, NEVER_RETRY, DrafterError
from drafter.recipe import Recipe
from gpu_host.deploy import deploy
from gpu_host.hooks import GpuHostHook


class Failed(AirflowException):
    """Another try may help. ``exit_code`` as in :mod:`drafter.errors`."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FailedForGood(Failed, AirflowFailException):
    """Airflow does not try again."""


def failure(log: Any, exit_code: int, reason: str) -> Failed:
    """What to raise: another try, or not, as the exit code says. ``reason`` is also logged, as the
    one line that starts with ``drafter:``, because Airflow logs an exception apart from its text.
    """
    message = f"drafter: {reason}"
    log.error("%s", message)
    return (FailedForGood if exit_code in NEVER_RETRY else Failed)(message, exit_code)


def output_of(
    log: Any, hook: GpuHostHook, arguments: list[str], stdin: str = "", timeout_s: float = 60
) -> str:
    """stdout of a ``drafter`` command. When it fails, all it wrote is logged, and the last line of
    its stderr is the exception's message."""
    try:
        exit_code, output, errors = hook.run(arguments, stdin, timeout_s)
    except DrafterError as error:
        raise failure(log, error.exit_code, str(error)) from None
    if exit_code:
        for line in (output + errors).splitlines():
            log.error("%s", line.removeprefix("drafter: "))
        last = (errors.strip() or output.strip() or "it said nothing").splitlines()[-1]
        meaning = MEANING.get(exit_code, "failed")
        raise failure(
            log,
            exit_code,
            f"{arguments[0]}: {meaning} (exit {exit_code}): " + last.removeprefix("drafter: "),
        )
    return output


class DeployOperator(BaseOperator):
    """Put this deployment's code, recipe and launcher on the host; returns the code's sha256."""

    def __init__(self, *, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.recipe = recipe

    def execute(self, context: Any) -> str:  # noqa: ARG002
        with GpuHostHook.of(self.recipe.host) as hook:
            try:
                sha256 = deploy(hook, self.recipe)
            except DrafterError as error:
                raise failure(self.log, error.exit_code, str(error)) from None
        self.log.info("Code %s is on the host, in %s", sha256, self.recipe.host.workspace)
        return sha256


class HostCommandOperator(BaseOperator):
    """Run a short ``drafter`` command on the host and log what it prints."""

    template_fields = ("command", "code")

    def __init__(
        self,
        *,
        recipe: Recipe,
        command: list[str],
        code: str | None = None,
        timeout_s: float = 600,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.recipe = recipe
        self.command = command
        self.code = code
        self.timeout_s = timeout_s

    def execute(self, context: Any) -> None:  # noqa: ARG002
        with self.hook() as hook:
            output = output_of(self.log, hook, self.command, timeout_s=self.timeout_s)
        for line in output.splitlines():
            self.log.info("%s", line)

    def hook(self) -> GpuHostHook:
        return GpuHostHook.of(self.recipe.host, self.code)
