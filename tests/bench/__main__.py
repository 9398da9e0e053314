"""``python -m bench [NAME]``: every benchmark, or one, as a line of JSON each.

Ends with 1 when one misses its bar; see bench.measure for the fields.
"""

from __future__ import annotations

import sys

from bench import jobs

BENCHMARKS = {"job-start": jobs.job_start, "job-end": jobs.job_end}


def main(arguments: list[str]) -> int:
    unknown = [name for name in arguments if name not in BENCHMARKS]
    if unknown:
        print(f"bench: no {unknown[0]!r}: there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 64
    missed = 0
    for name in arguments or BENCHMARKS:
        result = BENCHMARKS[name]()
        print(result.line(name), flush=True)
        missed += not result.passes
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
