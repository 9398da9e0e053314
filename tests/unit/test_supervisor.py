"""Jobs start once, end as they should, and take their whole tree with them: with real processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from unit.host import NOISY, QUIET, STUBBORN, Host, until

from drafter import jobs, processes
from drafter.errors import Busy, DrafterError, RecipeError, Stopped
from drafter.files import write_json
from drafter.supervisor import Clock


@pytest.fixture
def host(tmp_path: Path) -> Any:
    host = Host(tmp_path / 'it\'s a $(touch x) "dir"')
    yield host
    jobs.stop_all(host.workspace.root)
    until(lambda: host.processes() == [], 2)


def say(text: str, code: int = 0) -> list[str]:
    return ["bash", "-c", f"echo {text}; exit {code}"]


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (say("fine"), 0, ""),
        (say("bad", 65), 65, "ended with 65"),
        (["bash", "-c", "kill -9 $$"], 137, "killed by SIGKILL (out of memory?)"),
        (["bash", "-c", "kill -11 $$"], 139, "killed by SIGSEGV"),
        (["bash", "-c", "kill -40 $$"], 168, "killed by signal 40"),
        (["bash", "-c", "kill $$"], 1, "killed by SIGTERM"),
        (say("odd", 143), 1, "ended with 143, although nobody stopped it"),
        (["/no/such/program"], 127, "cannot run /no/such/program"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_exit_record_says_how_the_phase_ended(
    host: Host, argv: list[str], code: int, reason: str
) -> None:
    start_id = host.start(argv)["start_id"]
    record = host.ended()
    assert (record["start_id"], record["code"]) == (start_id, code)
    assert record["reason"].startswith(reason)


@pytest.mark.parametrize("argv", [QUIET, NOISY, STUBBORN], ids=["quiet", "noisy", "stubborn"])
def test_a_stop_leaves_no_process_within_ten_seconds(host: Host, argv: list[str]) -> None:
    host.start(argv)
    if argv is STUBBORN:
        until(lambda: "ready" in host.starts())
    began = time.monotonic()
    answer = host.stop()
    assert time.monotonic() - began < 5
    assert answer["outcome"] == "stopped"
    assert host.processes() == []
    assert host.ended()["code"] == 143


@pytest.mark.parametrize("victim", ["supervisor", "guardian"])
def test_killing_a_watching_process_kills_the_tree(host: Host, victim: str) -> None:
    host.start(STUBBORN)
    until(lambda: "ready" in host.starts())
    os.kill(host.pids(victim), signal.SIGKILL)
    until(lambda: host.processes() == [], 2)
    assert host.ended() | {"ended": 0} == {
        "start_id": host.poll()["start_id"],
        "code": 1,
        "reason": f"the {victim} was killed",
        "ended": 0,
        "request": None,
    }


def test_what_outlives_both_watching_processes_dies_at_the_next_look(host: Host) -> None:
    host.start(STUBBORN)
    until(lambda: "ready" in host.starts())
    guardian = host.pids("guardian")
    os.kill(guardian, signal.SIGSTOP)
    os.kill(host.pids("supervisor"), signal.SIGKILL)
    os.kill(guardian, signal.SIGKILL)
    # A process that is ending has no command line any more, but is not dead yet.
    until(lambda: len(host.processes()) == 2 and jobs.live(host.job) is None)
    look = host.poll()
    assert (look["alive"], look["exit"]) == (False, None)
    assert host.processes() == []
    assert host.start(say("again"))["outcome"] == "started"
    assert host.ended()["code"] == 0


def test_a_look_leaves_alone_what_is_just_being_started(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start(QUIET)
    with monkeypatch.context() as patch:
        # Between job.json and the spawn a job looks dead, and the look goes on to sweep.
        patch.setattr(jobs, "live", lambda _: None)
        with open(host.job.starting) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            host.poll()
    assert host.poll()["alive"]
    looks = iter([None, "the start has ended meanwhile"])
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "live", lambda _: next(looks))
        host.poll()
    assert host.poll()["alive"]


def test_a_stop_ends_what_outlived_both_watching_processes(host: Host) -> None:
    host.start(STUBBORN)
    until(lambda: "ready" in host.starts())
    guardian = host.pids("guardian")
    os.kill(guardian, signal.SIGSTOP)
    os.kill(host.pids("supervisor"), signal.SIGKILL)
    os.kill(guardian, signal.SIGKILL)
    # A process that is ending has no command line any more, but is not dead yet.
    until(lambda: len(host.processes()) == 2 and jobs.live(host.job) is None)
    assert host.stop() == {"outcome": "stopped"}
    assert host.processes() == []
    assert host.stop() == {"outcome": "not running"}


@pytest.mark.parametrize("text", ["garbage{", "null", "[]", ""])
@pytest.mark.parametrize("name", ["job", "progress", "stop"])
def test_a_spoilt_record_keeps_nothing_alive(host: Host, name: str, text: str) -> None:
    host.start(QUIET)
    path = getattr(host.job, name)
    path.write_text(text)
    assert host.poll()["alive"]
    assert [o["outcome"] for o in jobs.stop_all(host.workspace.root).values()] == ["stopped"]
    assert host.processes() == []
    assert host.start(say("again"))["outcome"] == "started"
    assert host.ended()["code"] == 0


def test_a_suspended_job_still_stops(host: Host) -> None:
    host.start(QUIET)
    for name in ("guardian", "supervisor", "child"):
        os.kill(host.pids(name), signal.SIGSTOP)
    assert host.stop()["outcome"] == "stopped"
    assert host.processes() == []


def test_a_full_disk_cannot_keep_a_job_from_stopping(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _value: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    host.start(QUIET)
    monkeypatch.setattr(jobs, "write_json", full)
    monkeypatch.setattr(jobs, "_REACTION_S", 0.2)
    assert host.stop(request="try")["exit"]["code"] == 143
    assert host.processes() == []
    with pytest.raises(DrafterError, match=r"No space left on device.*free space on the host"):
        host.start(QUIET)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"lease_s": 0.6}, 142), ({"timeout_s": 0.6}, 124)],
    ids=["lease", "deadline"],
)
def test_a_job_ends_itself(host: Host, changes: dict[str, Any], code: int) -> None:
    host.start(QUIET, **changes)
    took = until(lambda: not host.poll(renew=False)["alive"], 5)
    assert host.ended()["code"] == code
    assert took < 3
    until(lambda: host.processes() == [], 1)


def test_polling_renews_the_lease(host: Host) -> None:
    host.start(QUIET, lease_s=0.6)
    for _ in range(15):
        time.sleep(0.1)
        assert host.poll()["alive"]


def test_a_clock_that_jumps_counts_as_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([100.0, 100.1, 3700.1, 50.0, 50.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(readings))
    clock = Clock()
    assert [round(clock.tick(), 6) for _ in range(4)] == [0.1, 1.1, 1.1, 1.6]


def test_a_start_that_cannot_write_leaves_the_last_record(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start(say("once"))
    record = host.ended()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "job.json")

    monkeypatch.setattr(jobs, "write_json", full)
    with pytest.raises(DrafterError, match="free space on the host"):
        host.start(say("again"))
    assert host.poll()["exit"] == record


def test_two_starts_at_once_give_one_copy(host: Host) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: host.start(NOISY), range(8)))
    assert sorted(answer["outcome"] for answer in answers) == ["following"] * 7 + ["started"]
    assert len({answer["start_id"] for answer in answers}) == 1
    assert sum("while" in command for command in host.processes()) == 1


def test_live_with_other_settings_is_busy(host: Host) -> None:
    host.start(QUIET)
    with pytest.raises(Busy, match=r"live with other settings.*drafter stop B1"):
        host.start(QUIET, what="other")


def test_a_locked_dataset_is_busy_and_nothing_starts(host: Host) -> None:
    lock = host.workspace.lock("generate", "B1")
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="is held by something else"):
            host.start(say("never"))
    assert host.starts() == []


def test_the_lock_is_held_while_the_job_lives_and_free_after(host: Host) -> None:
    host.start(QUIET)
    with open(host.workspace.lock("generate", "B1"), "w") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        host.stop()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_a_stop_that_races_a_start_leaves_nothing(host: Host, delay_s: float) -> None:
    starter = threading.Thread(target=lambda: host.start(NOISY))
    starter.start()
    time.sleep(delay_s)
    first = host.stop()
    starter.join()
    if first["outcome"] == "not running":  # it came before the start had begun
        host.stop()
    assert host.processes() == []
    assert host.stop() == {"outcome": "not running"}
    assert host.ended()["code"] == 143


def test_a_start_by_somebody_already_stopped_is_refused(host: Host) -> None:
    assert host.stop(request="try 1") == {"outcome": "not running"}
    with pytest.raises(Stopped, match="was stopped before it started"):
        host.start(QUIET, request="try 1")
    assert host.start(QUIET, request="try 2")["outcome"] == "started"


def test_stopping_one_start_leaves_the_next_alone(host: Host) -> None:
    first = host.start(QUIET)["start_id"]
    host.stop()
    host.start(QUIET)
    assert host.stop(start_id=first) == {"outcome": "not running"}
    assert host.poll()["alive"]


def test_a_stop_after_the_end_changes_nothing(host: Host) -> None:
    host.start(say("fine"))
    record = host.ended()
    # Its guardian ends a moment after it; what still ends there, a stop would end.
    until(lambda: not host.processes())
    assert host.stop() == {"outcome": "not running"}
    assert host.ended() == record


def test_stop_all_ends_every_job_at_once(host: Host) -> None:
    for dataset in ("B1", "B2", "B3", "B4"):
        lock = str(host.workspace.lock("generate", dataset))
        host.start(STUBBORN, dataset=dataset, lock=lock, grace_s=1)
    began = time.monotonic()
    answers = jobs.stop_all(host.workspace.root)
    assert time.monotonic() - began < 4
    assert [answer["outcome"] for answer in answers.values()] == ["stopped"] * 4
    assert host.processes() == []


def test_a_recycled_pid_is_never_signalled(host: Host) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        host.start(say("fine"))
        host.ended()
        now = processes.look(bystander.pid)
        assert now is not None
        before = processes.Process(now.pid, now.starttime - 1)
        assert not processes.send(before, signal.SIGKILL)
        # A record of a job that was killed, whose pids now belong to somebody else.
        state = json.loads(host.job.state.read_text())
        state |= {name: [before.pid, before.starttime] for name in ("supervisor", "guardian")}
        write_json(host.job.state, state)
        host.job.exit.unlink()
        assert host.stop() == {"outcome": "not running"}
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_job_started_by_a_job_is_another_job(host: Host) -> None:
    inner = host.spec(QUIET, dataset="B2", lock=str(host.workspace.lock("generate", "B2")))
    program = (
        "import json, sys; from pathlib import Path; from drafter import jobs;"
        " jobs.start(Path(sys.argv[1]), json.loads(sys.argv[2]))"
    )
    arguments = [str(host.workspace.root), json.dumps(inner)]
    host.start([sys.executable, "-c", program, *arguments])
    assert host.ended()["code"] == 0
    assert jobs.live(host.workspace.job("generate", "B2"))


def test_a_job_from_before_a_reboot_is_dead(host: Host) -> None:
    host.start(say("fine"))
    host.ended()
    host.job.exit.unlink()
    supervisor = processes.look(os.getpid())
    assert supervisor is not None
    state = json.loads(host.job.state.read_text())
    state |= {"boot_id": "another", "supervisor": [supervisor.pid, supervisor.starttime]}
    write_json(host.job.state, state)
    look = host.poll()
    assert (look["alive"], look["exit"]) == (False, None)


def test_edited_code_does_not_run(host: Host) -> None:
    (host.workspace.code(host.code) / "drafter" / "errors.py").write_text("# edited\n")
    with pytest.raises(RecipeError, match="is not the code it is named after"):
        host.start(say("never"))
    assert host.starts() == []


def test_the_log_comes_by_offset_in_whole_lines_and_complete(host: Host) -> None:
    host.start(["bash", "-c", "echo eins; printf 'zw\\xc3\\xb6lf'; sleep 0.5; printf ' end'"])
    until(lambda: host.poll()["log_bytes"] >= 10)
    first = host.poll()
    assert (first["log"], first["offset"]) == ("eins\n", 5)
    host.ended()
    assert host.poll(first["offset"])["log"] == "zwölf end"
    second = host.start(say("again"))
    host.ended()
    assert host.poll(second["offset"])["log"] == "again\n"


def test_a_long_log_comes_in_pieces_without_a_gap(host: Host) -> None:
    host.start(["bash", "-c", "seq 200000"])
    host.ended()
    offset, text = 0, ""
    while (look := jobs.poll(host.job.root, offset, renew=False))["offset"] > offset:
        offset = look["offset"]
        text += look["log"]
    assert offset == look["log_bytes"]
    assert text.split() == [str(n) for n in range(1, 200_001)]


def test_a_job_sees_its_directory_and_leaves_no_bytecode(host: Host) -> None:
    host.start([sys.executable, "-c", "import os, drafter.layout; print(os.getcwd())"])
    assert host.ended()["code"] == 0
    assert host.poll()["log"].strip() == str(host.job.root)
    assert not list(host.workspace.root.rglob("__pycache__"))
