"""The kill matrix's short form: whatever a user does to a waiting task, its job dies."""

from __future__ import annotations

import os
import subprocess
import sys

from integration.kill_matrix import ACTS, VARIANTS

from demo.stack import ROOT


def test_every_act_of_a_user_ends_every_kind_of_job() -> None:
    paths = (ROOT / "include", ROOT / "plugins", ROOT / "tests")
    done = subprocess.run(
        [sys.executable, "-m", "integration.kill_matrix", "--short"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    fine = {(row[0], row[1]) for row in table if row[-1:] == ["ok"]}
    assert fine == {(f"{act} (deferred)", variant) for act in ACTS for variant in VARIANTS}
