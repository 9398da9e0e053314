"""The operator that runs one phase on one dataset as a job on the GPU host.

It only keeps its arguments when a DAG is parsed. Exit codes of :mod:`drafter.errors` decide about
retries; nothing else of what the host says is interpreted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from airflow.sdk import Asset, AssetAlias, BaseOperator

from drafter.code import code_hash
from drafter.errors import MEANING, DrafterError, RecipeError, Stopped
from drafter.files import digest
from drafter.layout import ALL, JobDir, Workspace
from drafter.plan import MODES
from drafter.recipe import Recipe
from gpu_host import alerts
from gpu_host.commands import failure, output_of
from gpu_host.deploy import PACKAGE
from gpu_host.hooks import GpuHostHook
from gpu_host.links import PageLink, ReportLink, page_url
from gpu_host.triggers import JobTrigger

GPU_PHASES = frozenset({"generate", "extract", "spool", "train", "evaluate"})
"""They take slots of the recipe's pool, also while deferred (the pool must count deferred)."""

START_TIMEOUT_S = 600
"""``drafter start`` looks at the plan first, which may hash source files."""

STOP_TIMEOUT_S = 15
SAMPLES = 3
SAMPLES_TIMEOUT_S = 120
"""The host loads the target's tokenizer for them."""

SAMPLES_CHARACTERS = 20_000
_NOT_COUNTS = frozenset({"time", "start_id", "done", "changed", "line"})


class PhaseOperator(BaseOperator):
    """Run one phase on one dataset (or ``"all"``) as a job on the host; safe to repeat.

    Starts the job or follows the live one, then defers. A dataset whose plan is "done" succeeds at
    once and never defers. The return value is {outcome "ran" | "done", changed, counts...}.
    ``asset`` (a prefix of URIs, to which ``/<dataset>`` is added, or the asset of a phase over all
    datasets) gets one event per content: whichever try finds the phase done announces it, unless
    the asset's last event has the same digest. ``mode``, ``token_budget`` and ``code`` are
    templates; an empty budget or "None" means the recipe's, an empty code the package as it is
    here. With ``pilot_rows`` generate stops at so many rows, where a person has to approve them
    before the rest. The log of a task that succeeds ends with one line of numbers. What generate
    stored last is the XCom ``samples``, to which the task's link leads.
    """

    operator_extra_links = (ReportLink(), PageLink())
    # The dataset first: templates of the others may mention it, and fields render in this order.
    template_fields = ("dataset", "code", "mode", "token_budget")

    def __init__(
        self,
        *,
        phase: str,
        dataset: str,
        recipe: Recipe,
        code: str | None = None,
        mode: str = "resume",
        token_budget: str | int | None = None,
        pilot_rows: int | None = None,
        asset: str | Asset | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{**_defaults(phase, recipe, asset), **kwargs})
        self.phase = phase
        self.dataset = dataset
        self.recipe = recipe
        self.code = code
        self.mode = mode
        self.token_budget = token_budget
        self.pilot_rows = pilot_rows
        self.asset = asset
        self._request: str | None = None

    @classmethod
    def partial(cls, **kwargs: Any) -> Any:
        """The scheduler reads a mapped task's pool and name here: it never sees an instance."""
        defaults = _defaults(kwargs["phase"], kwargs["recipe"], kwargs.get("asset"))
        return super().partial(**{**defaults, **kwargs})

    def execute(self, context: Any) -> dict[str, Any]:
        return self._begin(context)

    def execute_complete(self, context: Any, event: dict[str, Any], outcome: str) -> dict[str, Any]:
        """Judge the end of a job that this try started, or (``outcome``) was "following"."""
        end = event["exit"] or {}
        if event["outcome"] == "replaced":
            return self._begin(context)
        if event["outcome"] == "unreachable":
            raise failure(self.log, 1, f"{self._name}: {event['message']}")
        if event["outcome"] == "lost":
            raise failure(
                self.log,
                1,
                f"{self._name} ended without a record: the host rebooted, killed it for memory, or"
                " has a full disk; a retry resumes",
            )
        asker = end["request"]
        if end["code"] == Stopped.exit_code and asker not in (None, self._asker(context)):
            self.log.info("The job was stopped because an earlier try was: starting it anew")
            return self._begin(context)
        if end["code"]:
            raise failure(self.log, end["code"], self._story(end, event["last_line"]))
        progress = event["progress"] or {}
        if outcome == "following":
            # Somebody else started it, perhaps with another budget: what does the plan say now?
            answer = self._start(context)
            if answer["outcome"] != "done":
                self._defer(context, answer)
        if self.phase == "generate":
            self._show_samples(context)
        if self.asset is not None:
            self._announce(context, self._digest())
        if progress.get("line"):
            self.log.info("%s: %s", self._name, progress["line"])
        counts = {key: value for key, value in progress.items() if key not in _NOT_COUNTS}
        return {"outcome": "ran", "changed": bool(progress.get("changed")), **counts}

    def on_kill(self) -> None:
        """The running task is being killed: stop the job, also one that is just being started."""
        if self._request is None:
            return
        arguments = ["stop", "--job", str(self._job_dir.root), "--request", self._request]
        with self.hook() as hook:
            answer = output_of(self.log, hook, arguments, timeout_s=STOP_TIMEOUT_S)
        self.log.info("%s", answer.strip())

    def _begin(self, context: Any) -> dict[str, Any]:
        answer = self._start(context)
        if answer["outcome"] == "done":
            self._announce(context, answer["digest"])
            numbers = ", ".join(
                f"{key} {value:,}" if isinstance(value, int | float) else f"{key} {value}"
                for key, value in answer["counts"].items()
                if isinstance(value, int | float | str)
            )
            self.log.info("%s: nothing to do, %s; %s", self._name, answer["reason"], numbers)
            return {"outcome": "done", "changed": False, **answer["counts"]}
        self._defer(context, answer)
        raise AssertionError("defer raises")

    def _start(self, context: Any) -> dict[str, Any]:
        self._request = self._asker(context)
        try:
            spec = self._spec(context)
        except DrafterError as error:
            raise failure(self.log, error.exit_code, str(error)) from None
        with self.hook() as hook:
            output = output_of(self.log, hook, ["start"], json.dumps(spec), START_TIMEOUT_S)
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        if answer["outcome"] != "done":
            self.log.info(
                "%s job %s in %s; stop it with `drafter stop %s` on the host",
                "Started" if answer["outcome"] == "started" else "Following",
                answer["start_id"],
                self._job_dir.root,
                self.dataset,
            )
            if url := page_url(self.phase, self.dataset):
                self.log.info("What it finds is shown at %s", url)
        return answer

    def _defer(self, context: Any, answer: dict[str, Any]) -> None:
        asker, told = self._asker(context), self._alerts(context)
        self.defer(
            trigger=JobTrigger.of(self.recipe.host, self._code, self._job_dir, answer, asker, told),
            method_name="execute_complete",
            kwargs={"outcome": answer["outcome"]},
        )

    def _alerts(self, context: Any) -> dict[str, Any] | None:
        if self.recipe.alerts.notifier is None:
            return None
        about = alerts.subject(self.recipe, context, self.phase, self.dataset)
        return {"settings": alerts.settings(self.recipe), "about": about}

    def _show_samples(self, context: Any) -> None:
        """The last rows, as people on the host read them; without them the task is as good."""
        command = ["show", self.dataset, "--last", str(SAMPLES)]
        try:
            with self.hook() as hook:
                code, output, errors = hook.run(command, timeout_s=SAMPLES_TIMEOUT_S)
        except DrafterError as error:
            code, output, errors = error.exit_code, "", str(error)
        if code:
            self.log.warning("No samples: %s", errors.strip()[-300:])
            return
        if len(output) > SAMPLES_CHARACTERS:
            output = output[:SAMPLES_CHARACTERS] + f"... `drafter show {self.dataset}` has the rest"
        context["ti"].xcom_push(key="samples", value=output.splitlines())

    def _spec(self, context: Any) -> dict[str, Any]:
        """job.json without its start id; see drafter.job."""
        if self.mode not in MODES:
            raise RecipeError(f"mode is {self.mode!r}: it is one of {', '.join(MODES)}")
        if self.dataset != ALL:
            self.recipe.dataset(self.dataset)
        host, run_id = self.recipe.host, context["run_id"]
        job_dir = self._job_dir
        return {
            "phase": self.phase,
            "dataset": self.dataset,
            "argv": [host.python, "-m", "drafter", "run", str(job_dir.root)],
            "what": what(self.recipe, self.phase, self.dataset, self.mode, run_id, self.pilot_rows),
            "code": self._code,
            "run_id": run_id,
            "mode": self.mode,
            "token_budget": _budget(self.token_budget),
            "pilot_rows": self.pilot_rows,
            "in_flight": max(1, self.recipe.engine.in_flight // host.slots),
            "recipe": self.recipe.as_json(),
            "timeout_s": host.timeout_s,
            "lease_s": host.lease_s,
            "grace_s": host.grace_s,
            "lock": str(self._workspace.lock(self.phase, self.dataset)),
            "request": self._request,
        }

    def _digest(self) -> str | None:
        """Of what the phase left on the host, as ``start`` gives it when there is nothing to do."""
        command = ["plan", self.phase, self.dataset, "--json"]
        with self.hook() as hook:
            output = output_of(self.log, hook, command, timeout_s=START_TIMEOUT_S)
        digest: str | None = json.loads(output.splitlines()[-1])[0]["digest"]
        return digest

    def _announce(self, context: Any, digest: str | None) -> None:
        """Through an alias, because an outlet that is an asset gets its event in any case."""
        if self.asset is None or digest is None:
            return
        asset = self.asset
        if isinstance(asset, str):
            asset = _of_dataset(asset, self.dataset)
        if last_digest(context, asset) != digest:
            extra = {"dataset": self.dataset, "digest": digest}
            context["outlet_events"][_alias(self.asset)].add(asset, extra=extra)

    def _story(self, end: dict[str, Any], last_line: str) -> str:
        words = (end["reason"], last_line.removeprefix("drafter: "))
        said = "; ".join(dict.fromkeys(filter(None, words)))
        meaning = MEANING.get(end["code"], "failed")
        return f"{self._name}: {meaning} (exit {end['code']}): {said}; log: {self._job_dir.log}"

    def _asker(self, context: Any) -> str:
        """This try: Airflow gives every try an id of its own."""
        return str(context["ti"].id)

    def hook(self) -> GpuHostHook:
        return GpuHostHook.of(self.recipe.host, self._code)

    @property
    def _code(self) -> str:
        return code_hash(PACKAGE) if self.code in (None, "", "None") else str(self.code)

    @property
    def _name(self) -> str:
        return f"{self.phase if self.pilot_rows is None else 'pilot of'} {self.dataset}"

    @property
    def _workspace(self) -> Workspace:
        return Workspace(Path(self.recipe.host.workspace))

    @property
    def _job_dir(self) -> JobDir:
        return self._workspace.job(self.phase, self.dataset)


def what(
    recipe: Recipe,
    phase: str,
    dataset: str,
    mode: str,
    run_id: str,
    pilot_rows: int | None = None,
) -> str:
    """Hash of what is to be done: two starts with the same one mean the same job.

    Phase, dataset, target and the phase's recipe section, the rows of a pilot, and the run when
    restarting; not code, budgets or concurrency.
    """
    tree = recipe.as_json()
    sections = {
        "prepare": ("generate",),
        "spool": ("extract", "train"),
        "train": ("extract", "train") if recipe.spools else ("train",),
        "export": ("train",),
        "served": ("evaluate",),
    }.get(phase, (phase,))
    value = {"phase": phase, "dataset": dataset, "target": tree["target"]}
    value |= {section: tree[section] for section in sections}
    if "extract" in sections:
        value["extract"] = recipe.extract.rules()
    if phase == "evaluate":
        value |= {"evaluate": recipe.evaluate.rules(), "checkpoint": recipe.train.export}
    if phase == "prepare":
        limits = ("token_budget", "min_tokens")
        value["datasets"] = [
            {key: item for key, item in source.items() if key not in limits}
            for source in tree["datasets"]
        ]
    if pilot_rows is not None:
        value["pilot_rows"] = pilot_rows
    if mode == "restart":
        value["run_id"] = run_id
    return digest(value)


def _defaults(phase: str, recipe: Recipe, asset: str | Asset | None) -> dict[str, Any]:
    defaults: dict[str, Any] = {"map_index_template": "{{ task.dataset }}"}
    defaults |= alerts.callbacks(recipe, phase)
    if phase in GPU_PHASES:
        defaults["pool"] = recipe.host.pool
        defaults["pool_slots"] = _slots(phase, recipe)
    if asset is not None:
        defaults["outlets"] = [_alias(asset)]
        # What was announced can be read of inlets only. A mapped task's are those of every dataset.
        names = recipe.dataset_names
        defaults["inlets"] = (
            [_of_dataset(asset, name) for name in names] if isinstance(asset, str) else [asset]
        )
    return defaults


def _slots(phase: str, recipe: Recipe) -> int:
    """Of the pool: a phase that loads the target's weights needs its share of the host's GPUs."""
    slots = recipe.host.slots
    share = max(1, slots // recipe.extract.jobs)
    if phase in ("extract", "evaluate"):
        return share
    # Of a spool both sides run at once, so neither may take all.
    extracting = min(share, slots - 1) if recipe.spools else 0
    return {"spool": extracting, "train": slots - extracting}.get(phase, 1)


def last_digest(context: Any, asset: Asset) -> str | None:
    """On the newest event of ``asset``, an inlet of the task; None when there is none."""
    events = context["inlet_events"][asset]
    return (events[-1].extra or {}).get("digest") if len(events) else None


def _of_dataset(prefix: str, dataset: str) -> Asset:
    return Asset(f"{prefix}/{dataset}")


def _alias(asset: str | Asset) -> AssetAlias:
    return AssetAlias(asset if isinstance(asset, str) else asset.uri)


def _budget(value: str | int | None) -> int | None:
    if value in (None, "", "None"):
        return None
    try:
        budget = int(str(value))
    except ValueError:
        budget = 0
    if budget < 1:
        raise RecipeError(f"token budget is {value!r}: give a number above 0, or nothing")
    return budget
