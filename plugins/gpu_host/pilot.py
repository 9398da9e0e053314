"""The task between a dataset's pilot and the rest of its rows: a person looks, and says yes or no.

It asks the host what there is to approve; mostly nothing, and it succeeds at once. Otherwise it
shows the pilot's figures and samples and waits in Airflow's state ``awaiting_input``: no slot, no
process, no connection, for days if need be. The answer is kept on the host (approval.py), so a
later run, a retry or a clear does not ask again, and no other way leads past it: there the job that
generates the rest looks for it too.
"""

from __future__ import annotations

import json
import re
import textwrap
import time
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator, HITLOperator
from airflow.sdk.exceptions import AirflowSkipException, TaskAwaitingInput

from drafter.errors import NEVER_RETRY, DataError, DeadlinePassed, RecipeError
from drafter.recipe import Recipe
from gpu_host import alerts
from gpu_host.commands import Failed, FailedForGood, failure, output_of
from gpu_host.hooks import GpuHostHook

SHOW_TIMEOUT_S = 600
"""The host loads the target's tokenizer and reads every row of the pilot."""

ANSWER_TIMEOUT_S = 120
FOLDED_AT = 110
"""Characters of a line on the page."""

PAUSES_S = (5.0, 15.0, 30.0, 60.0, 120.0, 240.0)
"""Between tries to keep an answer on a host that cannot be reached or is busy. A retry of the task
would ask the person again."""


class ApprovePilotOperator(ApprovalOperator):
    """Ask a person about a dataset's pilot. Approved: the answer is kept on the host. Rejected: the
    pilot is archived there, and the task is skipped, and with it what follows for this dataset.
    No answer within the recipe's ``response_timeout_s``: failed, and not tried again.

    Returns {outcome: "nothing to ask" | "approved", ...}. ``mode`` and ``token_budget`` are those
    of the tasks around it, and templates, like ``code``.
    """

    template_fields = ("dataset", "code", "mode", "token_budget")

    def __init__(
        self,
        *,
        dataset: str,
        recipe: Recipe,
        code: str,
        mode: str = "resume",
        token_budget: str | int | None = None,
        map_index_template: str = "{{ task.dataset }}",
        **kwargs: Any,
    ) -> None:
        if recipe.pilot is None:
            raise RecipeError(
                f"recipe {recipe.name} asks for no pilot: add [pilot], or no approval"
            )
        super().__init__(
            **{
                "subject": "Pilot",
                "response_timeout": timedelta(seconds=recipe.pilot.response_timeout_s),
                "map_index_template": map_index_template,
                # Its exit codes say nothing of rows: as of a sensor.
                **alerts.callbacks(recipe, "generate", is_sensor=True),
                **kwargs,
            }
        )
        self.dataset = dataset
        self.recipe = recipe
        self.code = code
        self.mode = mode
        self.token_budget = token_budget

    def execute(self, context: Any) -> dict[str, Any]:
        pilot = self._pilot(context)
        if pilot["action"] not in ("pilot", "approve"):
            self.log.info("%s: nothing to approve, %s", self.dataset, pilot["reason"])
            return {"outcome": "nothing to ask", "reason": pilot["reason"]}
        if pilot["rejected"]:
            raise self._skip(
                f"{self.dataset}: the pilot was rejected in this run and is in {pilot['rejected']}:"
                " clear its pilot task for another one"
            )
        if not pilot["figures"]["rows"]:
            raise failure(
                self.log,
                DataError.exit_code,
                f"{self.dataset} has no pilot to show ({'; '.join(pilot['story'])}): clear its"
                " pilot task, and read failed.jsonl on the host if that gives none",
            )
        self.subject = f"{self.dataset}: generate the rest, as in this pilot?"
        self.body = page(self.dataset, pilot, self.response_timeout)
        self._alert(context, pilot)
        try:
            super().execute(context)
        except TaskAwaitingInput as waiting:
            raise TaskAwaitingInput(
                method_name=waiting.method_name,
                kwargs={"seen": pilot["seen"]},
                timeout=waiting.timeout,
            ) from None
        raise AssertionError("it awaits input")

    def execute_complete(
        self, context: Any, event: dict[str, Any], seen: str = ""
    ) -> dict[str, Any]:
        # Not ApprovalOperator's own: it leaves the skipping to a dependency that reads an XCom, and
        # the task green.
        answer = HITLOperator.execute_complete(self, context, event)
        user = answer["responded_by_user"]
        by = user["name"] if user else "somebody"
        if answer["chosen_options"] == [self.APPROVE]:
            said = self._keep(context, "approve", by, seen)
            self.log.info("%s", said)
            return {"outcome": "approved", "by": by}
        raise self._skip(self._keep(context, "reject", by, seen))

    def process_trigger_event_error(self, event: dict[str, Any]) -> None:
        if event["error_type"] != "timeout":
            super().process_trigger_event_error(event)
        reason = (
            f"nobody answered for the pilot of {self.dataset} within {self.response_timeout}: its"
            " rows are kept, clear this task to be asked again"
        )
        self.log.error("drafter: %s", reason)
        raise FailedForGood(f"drafter: {reason}", DeadlinePassed.exit_code)

    def _pilot(self, context: Any) -> dict[str, Any]:
        """What ``drafter pilot show`` says."""
        command = ["pilot", "show", self.dataset, "--json", "--mode", self.mode]
        command += ["--run-id", context["run_id"]]
        if self.token_budget not in (None, "", "None"):
            command += ["--token-budget", str(self.token_budget)]
        with self.hook() as hook:
            output = output_of(self.log, hook, command, timeout_s=SHOW_TIMEOUT_S)
        pilot: dict[str, Any] = json.loads(output.splitlines()[-1])
        return pilot

    def _keep(self, context: Any, answer: str, by: str, seen: str) -> str:
        """Carry the person's answer out on the host; what that says."""
        command = ["pilot", answer, self.dataset, "--yes", f"--by={by}", "--seen", seen]
        command += ["--run-id", context["run_id"]]
        for pause_s in PAUSES_S:
            try:
                return self._once(command)
            except Failed as error:
                if error.exit_code in NEVER_RETRY:
                    raise
            time.sleep(pause_s)
        return self._once(command)

    def _once(self, command: list[str]) -> str:
        with self.hook() as hook:
            return output_of(self.log, hook, command, timeout_s=ANSWER_TIMEOUT_S).strip()

    def _skip(self, reason: str) -> AirflowSkipException:
        """Airflow's log hides the text of the exception."""
        self.log.info("%s", reason)
        return AirflowSkipException(reason)

    def _alert(self, context: Any, pilot: dict[str, Any]) -> None:
        """Who is told of trouble is told of a question too."""
        if self.recipe.alerts.notifier is None:
            return
        link = self.generate_link_to_ui_from_context(context=context)
        alert = {
            "condition": "approval",
            "reason": f"the pilot of {self.dataset} waits for approval: {link}",
            "numbers": pilot["figures"],
            **alerts.subject(self.recipe, context, "generate", self.dataset),
        }
        alerts.notify(alerts.settings(self.recipe), {**context, "alert": alert}, self.log.error)

    def hook(self) -> GpuHostHook:
        return GpuHostHook.of(self.recipe.host, self.code)


def page(dataset: str, pilot: dict[str, Any], timeout: timedelta) -> str:
    """The question in Markdown."""
    rows = pilot["figures"]["rows"]
    lines = [
        f"**Approve** generates the rest of {dataset}; these {rows:,} rows count. **Reject** moves"
        f" them to `archive/` on the host and skips {dataset} in this run. Without an answer within"
        f" {timeout} this task fails, and the rows stay.",
        "\n".join(f"* {line}" for line in pilot["story"]),
    ]
    for number, text in enumerate(pilot["samples"], 1):
        lines += [f"Sample {number} of {len(pilot['samples'])}:", fenced(text)]
    return "\n\n".join(lines)


def fenced(text: str) -> str:
    """A block of Markdown that shows ``text``, its long lines folded; nothing in it ends it."""
    text = "\n".join(map(_folded, text.split("\n")))
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _folded(line: str) -> str:
    """The page does not fold lines of a block, and a thought may be one."""
    parts = textwrap.wrap(
        line,
        FOLDED_AT,
        expand_tabs=False,
        replace_whitespace=False,
        drop_whitespace=False,
        break_on_hyphens=False,
    )
    return "\n".join(parts)
