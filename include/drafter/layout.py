"""Where everything lives on the GPU host. The only module that spells paths.

    <workspace>/
      code/<sha256>/drafter/       deployed copies of this package (see gpu_host.deploy)
      recipe.json  bin/drafter     resolved recipe and launcher of the newest code
      report.html                  what validate found, over all datasets; made under .report.lock
      prepared/<dataset>/
        .lock                      flock: one writer per dataset (supervisor, CLI, restart)
        prompts.jsonl              sample_id, messages, tools, source {id, row, revision}; where it
                                   was shortened to fit, shortened {elided, cut}
        prompt_ids.jsonl           derived: sample_id, input_ids; retired: true where it is
        raw_responses.jsonl        append-only: sample_id, output_ids, prompt_tokens,
                                   completion_tokens, finish_reason ("stop" | "length")
        failed.jsonl               requests without a storable row: sample_id, class, reason;
                                   final: false where the engine itself is in doubt
        sessions.jsonl             one line per job start, then (offset, time) marks
        rejected.jsonl             sample_id, reason: rows that validate did not accept
        tokenized_data.jsonl       sample_id, input_ids (prompt then output), prompt_tokens
        rows.parquet               what validate found, a line per stored row; see findings.py
        summary.csv                counts and histograms over them: dataset, figure, label, value
        report.html                the same for people, with a sample decoded for reading
        manifest.json              sections prepare, pilot (see approval.py), generate,
                                   validate
        *.torn                     last lines that a kill tore, set aside before the next append
        *.damaged                  lines that `drafter repair` set aside
        .rewrite/                  whole new files about to take their places: see drafter.rewrite
        archive/<run id>/          what restart and the canary (canary-N.jsonl) moved away;
                                   rejected-<run id>: a pilot that a person rejected;
                                   discard-<time> and restart-<time> by hand;
                                   <name>.partial while it is being filled
      hidden_states/<dataset>/     shard-00000.safetensors ...  manifest.json (section extract)
      hidden_states/.importing/    <dataset>/: an import until it is whole (drafter.interchange)
      drafter/<run>/               step-000500/  metrics.jsonl  evaluation/<dataset>.json
                                   curves.html, tensorboard/: made of metrics.jsonl
                                   evaluation/<dataset>.greedy.jsonl: the target's greedy answers
                                   no_states/: the same drafter trained without states
                                   witness.safetensors: a few rows with states, where the recipe
                                   spools (section spool)
                                   export/{sglang,vllm}/  manifest.json (sections train, export)
      spool/<run>/                 shard-000000.safetensors ...  position.json
                                   producer.end.json  trainer.end.json: see spool_store.py;
                                   gone when the run is trained
      spool/.<run>.producer        flocks of the two sides, which stay: a network file system keeps
      spool/.<run>.trainer         a directory that holds a file somebody has open
      jobs/<phase>/<dataset>/      job.json state.json progress.json log exit lease
                                   stop stopped .start .exit.reserved: see JobDir
                                   (dataset "all", with a .lock, for prepare, spool, train,
                                   export)

A manifest is a JSON object of sections; each phase replaces its own section and no other, under the
dataset's lock. A section holds ``identity`` (what must not change under the data), ``counts`` and
``files`` ({name: {bytes, sha256}} as the phase left them). Files appear whole (temporary name,
fsync, rename), except raw_responses.jsonl, failed.jsonl, sessions.jsonl, metrics.jsonl,
*.greedy.jsonl and log, which only grow. What a killed writer left under a temporary name
(``.<name>.<pid>.partial``) the next phase that writes there removes.

Standard library only: the status command and the supervisor use it with any python3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ALL = "all"
"""The dataset name of jobs that span every dataset."""

_GREEDY = ".greedy.jsonl"


@dataclass(frozen=True)
class Prepared:
    """``prepared/<dataset>``: prompts, responses and what was made of them."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts.jsonl"

    @property
    def prompt_ids(self) -> Path:
        return self.root / "prompt_ids.jsonl"

    @property
    def responses(self) -> Path:
        return self.root / "raw_responses.jsonl"

    @property
    def failed(self) -> Path:
        return self.root / "failed.jsonl"

    @property
    def sessions(self) -> Path:
        return self.root / "sessions.jsonl"

    @property
    def rejected(self) -> Path:
        return self.root / "rejected.jsonl"

    @property
    def tokenized(self) -> Path:
        return self.root / "tokenized_data.jsonl"

    @property
    def findings(self) -> Path:
        return self.root / "rows.parquet"

    @property
    def summary(self) -> Path:
        return self.root / "summary.csv"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def rewrite(self) -> Path:
        return self.root / ".rewrite"

    def archive(self, run_id: str) -> Path:
        return self.root / "archive" / slug(run_id)


@dataclass(frozen=True)
class HiddenStates:
    """``hidden_states/<dataset>``: shards and their manifest."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    def shard(self, index: int) -> Path:
        return self.root / f"shard-{index:05d}.safetensors"


@dataclass(frozen=True)
class DrafterRun:
    """``drafter/<run>``: one training run, its evaluation and its exports."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        return self.root / "curves.html"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    def checkpoint(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def evaluation(self, dataset: str) -> Path:
        return self.root / "evaluation" / f"{dataset}.json"

    def greedy(self, dataset: str) -> Path:
        """Greedy answers of the target to held-out prompts, kept so that none is paid for twice."""
        return self.root / "evaluation" / f"{dataset}{_GREEDY}"

    def export(self, engine: str) -> Path:
        return self.root / "export" / engine

    @property
    def served(self) -> Path:
        return self.root / "served.json"

    @property
    def witness(self) -> Path:
        """A shard of a few rows that outlives the spool: a head can be compared with its states."""
        return self.root / "witness.safetensors"


@dataclass(frozen=True)
class SpoolSide:
    """One of the two processes that meet in ``spool/<run>``."""

    spool: Path
    name: str

    @property
    def lock(self) -> Path:
        """flock: held while it is there."""
        return self.spool.with_name(f".{self.spool.name}.{self.name}")

    @property
    def end(self) -> Path:
        """{exit_code, reason}: why it ended for good."""
        return self.spool / f"{self.name}.end.json"


@dataclass(frozen=True)
class Spool:
    """``spool/<run>``: the shards between extraction and a training that deletes them."""

    root: Path

    @property
    def position(self) -> Path:
        return self.root / "position.json"

    @property
    def producer(self) -> SpoolSide:
        """Who makes shards."""
        return SpoolSide(self.root, "producer")

    @property
    def trainer(self) -> SpoolSide:
        """Who trains on them."""
        return SpoolSide(self.root, "trainer")

    def shard(self, index: int) -> Path:
        return self.root / f"shard-{index:06d}.safetensors"

    def shards(self) -> list[Path]:
        return sorted(self.root.glob("shard-*.safetensors"))


@dataclass(frozen=True)
class JobDir:
    """``jobs/<phase>/<dataset>``: one phase on one dataset, whatever Airflow calls the try."""

    root: Path

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def progress(self) -> Path:
        return self.root / "progress.json"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def exit(self) -> Path:
        return self.root / "exit"

    @property
    def reserved_exit(self) -> Path:
        """Becomes ``exit``: its bytes are taken at the start, so that a full disk cannot."""
        return self.root / ".exit.reserved"

    @property
    def lease(self) -> Path:
        return self.root / "lease"

    @property
    def stop(self) -> Path:
        """{start_id, request}: that start is to end."""
        return self.root / "stop"

    @property
    def stopped(self) -> Path:
        """{request}: the last asker that was stopped; a later start by it is refused."""
        return self.root / "stopped"

    @property
    def starting(self) -> Path:
        """flock: one start or stop at a time."""
        return self.root / ".start"


@dataclass(frozen=True)
class Workspace:
    """The root of one deployment's state. Another target or revision is another workspace."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.json"

    @property
    def launcher(self) -> Path:
        return self.root / "bin" / "drafter"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def report_lock(self) -> Path:
        """Held from the reading of rows.parquet to the writing of the pages made of it."""
        return self.root / ".report.lock"

    def code(self, sha256: str) -> Path:
        return self.root / "code" / sha256

    def prepared(self, dataset: str) -> Prepared:
        return Prepared(self.root / "prepared" / dataset)

    def hidden_states(self, dataset: str) -> HiddenStates:
        return HiddenStates(self.root / "hidden_states" / dataset)

    def importing(self, dataset: str) -> HiddenStates:
        """Beside the finished ones, so that a rename makes it one of them."""
        return HiddenStates(self.root / "hidden_states" / ".importing" / dataset)

    def drafter(self, run: str) -> DrafterRun:
        return DrafterRun(self.root / "drafter" / run)

    def drafters(self) -> list[DrafterRun]:
        return [DrafterRun(root) for root in sorted((self.root / "drafter").glob("*"))]

    def spool(self, run: str) -> Spool:
        return Spool(self.root / "spool" / run)

    def spools(self) -> list[Spool]:
        return [Spool(root) for root in sorted((self.root / "spool").glob("[!.]*"))]

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def job(self, phase: str, dataset: str) -> JobDir:
        return JobDir(self.jobs / phase / dataset)

    def lock(self, phase: str, dataset: str) -> Path:
        """The lock a job holds: the dataset's, or the phase's own for jobs over all datasets."""
        return (
            self.job(phase, ALL).root / ".lock" if dataset == ALL else self.prepared(dataset).lock
        )


def repaired_as(path: Path) -> str | None:
    """The dataset whose ``drafter repair`` looks at ``path``; None for what a phase writes anew."""
    prepared = Prepared(path.parent)
    if path in (prepared.prompts, prepared.responses, prepared.failed, prepared.sessions):
        return path.parent.name
    if path.name.endswith(_GREEDY):
        return path.name.removesuffix(_GREEDY)
    return None


def slug(run_id: str) -> str:
    """``run_id`` as one path component: Airflow run ids hold ``:`` and ``+``."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in run_id)
