"""``python -m bench [NAME]``: every benchmark, or one, as a line of JSON each. ``budget`` also
stands for all whose names begin with ``budget-``, and so does ``train``.

Ends with 1 when one misses its bar; see bench.measure for the fields.
"""

from __future__ import annotations

import sys
from itertools import chain

from bench import (
    budget,
    extraction,
    generation,
    jobs,
    prepare,
    training,
    training_quality,
    validation,
)

BENCHMARKS = {
    "job-start": jobs.job_start,
    "job-end": jobs.job_end,
    "engine-saturation": generation.engine_saturation,
    "client-ceiling": generation.client_ceiling,
    "resume-scan": generation.resume_scan,
    "generate-memory": generation.generate_memory,
    "prepare-rate": prepare.prepare_rate,
    "prepare-memory": prepare.prepare_memory,
    "validate-rows": validation.rows,
    "validate-phase": validation.phase,
    "validate-memory": validation.memory,
    "validate-rerun": validation.rerun,
    "extract-throughput": extraction.throughput,
    "padding-waste": extraction.padding_waste,
    "shard-write": extraction.shard_write,
    "extract-memory": extraction.memory,
    "train-ttt3": training.ttt3,
    "train-ttt7": training.ttt7,
    "train-memory": training.memory,
    "train-flat": training.flat,
    "train-quality": training_quality.quality,
    "budget": budget.overshoot_mean,
    "budget-max": budget.overshoot_max,
    "budget-kills": budget.overshoot_after_kills,
    "budget-bias": budget.length_bias,
    "budget-time": budget.time_taken,
}


def main(arguments: list[str]) -> int:
    meant = {argument: _meant(argument) for argument in arguments}
    unknown = [argument for argument, names in meant.items() if not names]
    if unknown:
        print(f"bench: no {unknown[0]!r}: there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 64
    missed = 0
    for name in chain.from_iterable(meant.values()) if meant else BENCHMARKS:
        result = BENCHMARKS[name]()
        print(result.line(name), flush=True)
        missed += not result.passes
    return 1 if missed else 0


def _meant(argument: str) -> list[str]:
    return [name for name in BENCHMARKS if name == argument or name.startswith(f"{argument}-")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
