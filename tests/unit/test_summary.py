"""The summary adds up over datasets and leaves unmeasured things out."""

from __future__ import annotations

from demo.summary import _overall, table


def test_acceptance_length_is_tokens_over_verifications_not_a_mean_of_means() -> None:
    evaluations = [
        {"sums": {"trained": {"generated": 30, "verifications": 10}}},
        {"sums": {"trained": {"generated": 10, "verifications": 10}}},
    ]
    assert _overall(evaluations, "trained") == 2.0


def test_a_baseline_that_was_not_trained_is_none() -> None:
    assert _overall([{"sums": {"no_states": None}}, {"sums": {}}], "no_states") is None


def test_the_table_names_every_number() -> None:
    summary = {
        "wall_s": 61.4,
        "datasets": {
            "B1": {
                "prompts": 9,
                "responses": 8,
                "completion_tokens": 1234,
                "token_budget": None,
                "stop_reason": "quota",
                "accepted": 7,
                "rejected": 1,
                "hidden_tokens": 99,
            }
        },
        "train": {"steps": 5, "first_loss": 6.0, "last_loss": 2.5},
        "acceptance_length": {
            "untrained": 1.0,
            "ngram": 1.2,
            "no_states": None,
            "trained": 2.9,
        },
        "drafter": "/w/export/sglang",
    }
    assert table(summary).splitlines() == [
        "dataset  prompts  responses  tokens  budget  stop   accepted  rejected",
        "B1       9        8          1,234   -       quota  7         1",
        "",
        "training: 5 steps, loss 6.000 -> 2.500",
        "acceptance length: untrained 1.000, ngram 1.200, no_states -, trained 2.900",
        "drafter: /w/export/sglang",
        "wall time: 61 s",
    ]
