"""What engines count about drafts, read from what real ones have said.

``metrics/``: GET /metrics of vLLM 0.32.0 with the demo's drafter, before and after 96 answers, and
of SGLang 0.5.23 without one (it cannot draft on a CPU); histogram buckets are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drafter.errors import Busy, RecipeError
from drafter.evaluation.acceptance import Counts, Sample, between, read, samples, sglang_says

METRICS = Path(__file__).parent / "metrics"
BEFORE, AFTER = (
    (METRICS / f"vllm_0.32.0_{when}.txt").read_text() for when in ("before", "after")
)  # fmt: skip
SGLANG = (METRICS / "sglang_0.5.23_without_drafter.txt").read_text()
LABELS = 'engine_type="unified",model_name="m",tp_rank="0"'
VERIFIED = f"{SGLANG}sglang:spec_verify_calls_total{{{LABELS}}} 20.0\n"
URL = "http://gpu:30000"


def test_a_vllm_that_has_not_drafted_yet_says_zero() -> None:
    assert read("vllm", BEFORE, URL) == Counts(0, 0, 0, 0, (0, 0, 0))


def test_what_vllm_counted_between_two_readings() -> None:
    counts = between(read("vllm", BEFORE, URL), read("vllm", AFTER, URL), URL)
    assert counts == Counts(2524, 820, 2460, 1702, (722, 576, 404))
    assert counts.length(num_answers=96) == pytest.approx((2524 - 96) / 820)
    assert counts.engine_length == pytest.approx(1 + 1702 / 820)
    assert counts.accepted_share_K == pytest.approx([722 / 820, 576 / 820, 404 / 820])


def test_engines_of_one_server_and_several_servers_add_up() -> None:
    once = read("vllm", AFTER, URL)
    second = re.sub('engine="0"', 'engine="1"', AFTER)
    assert read("vllm", AFTER + second, URL) == once + once == Counts(
        5048, 1640, 4920, 3404, (1444, 1152, 808)
    )  # fmt: skip


def test_sglang_counts_verifications_once_it_has_drafted() -> None:
    assert read("sglang", SGLANG, URL) == Counts(58, 0)
    counts = between(read("sglang", SGLANG, URL), read("sglang", VERIFIED, URL), URL)
    assert counts == Counts(0, 20)
    whole = read("sglang", VERIFIED, URL)
    assert whole.length(num_answers=2) == pytest.approx((58 - 2) / 20)
    assert whole.engine_length is None and whole.accepted_share_K is None
    assert (whole + whole).drafted is None


def test_nothing_verified_is_no_length() -> None:
    counts = Counts(10, 0, 0, 0, (0, 0, 0))
    assert counts.length(1) is None
    assert counts.engine_length is None and counts.accepted_share_K is None


def test_a_counter_that_went_backwards_is_a_server_started_anew() -> None:
    with pytest.raises(Busy, match=r"gpu:30000 went backwards .* started anew"):
        between(read("vllm", AFTER, URL), read("vllm", BEFORE, URL), URL)


@pytest.mark.parametrize(
    ("kind", "text", "remedy"),
    [
        ("vllm", "", "start vLLM without --disable-log-stats"),
        ("sglang", "", "start SGLang with --enable-metrics"),
        ("vllm", SGLANG, "has no metric of vllm"),
        ("sglang", AFTER, "has no metric of sglang"),
        ("vllm", "<html>Not here</html>", "this is no engine"),
    ],
    ids=["vllm without", "sglang without", "sglang for vllm", "vllm for sglang", "a web page"],
)
def test_metrics_that_are_not_there_name_the_flag(kind, text, remedy) -> None:
    with pytest.raises(RecipeError, match=re.escape(remedy)) as error:
        read(kind, text, URL)
    assert URL in str(error.value)


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("up 1", Sample("up", {}, 1.0)),
        ("up{} 2.5e3 1700000000000", Sample("up", {}, 2500.0)),
        ('a:b_total{x="1",y="2"} +Inf', Sample("a:b_total", {"x": "1", "y": "2"}, float("inf"))),
        (r'a{x="say \"b\", {c}} d",} 3', Sample("a", {"x": r"say \"b\", {c}} d"}, 3.0)),
    ],
    ids=["bare", "with a time", "labels", "braces and quotes in a label"],
)
def test_a_line_of_prometheus_text(line, sample) -> None:
    assert list(samples(f"# HELP up it is\n\n{line}\n")) == [sample]


def test_every_line_of_the_recordings_is_read() -> None:
    for text in (BEFORE, AFTER, SGLANG):
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert len(list(samples(text))) == len(lines) > 50


def test_what_sglang_says_itself() -> None:
    drafting = re.sub(r"(sglang:spec_accept_length{.*}) 0.0", r"\1 2.75", SGLANG)
    drafting = re.sub(r"(sglang:spec_accept_rate{.*}) 0.0", r"\1 0.58", drafting)
    states = [{"avg_spec_accept_length": 2.5}, {"avg_spec_accept_length": 3.0}, {}]
    said = sglang_says(drafting, {"internal_states": states})
    assert said == {"length": 2.75, "rate": 0.58, "mean_length": 2.75}
    silent = {"length": None, "rate": None, "mean_length": None}
    assert sglang_says(SGLANG, {}) == sglang_says(SGLANG, {"internal_states": [{}]}) == silent
