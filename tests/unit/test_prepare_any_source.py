"""Whatever a source holds, prepare does not crash and every row is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import KIMI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.test_prepare import Site, ids


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    KIMI.save(site.target)
    return site


LINES = st.lists(
    st.one_of(
        st.text(max_size=30).map(lambda text: text.replace("\n", " ")),
        st.fixed_dictionaries(
            {"input": st.one_of(st.none(), st.integers(), st.text(max_size=20))}
        ).map(json.dumps),
    ),
    max_size=20,
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=LINES)
def test_whatever_a_source_holds_rows_in_are_prompts_and_reasons(
    site: Site, lines: list[str]
) -> None:
    site.source("B2", "opencodeinstruct", [])
    good = json.dumps({"input": "surely a prompt"})
    text = "".join(f"{line}\n" for line in [good, *lines])
    Path(site.datasets[0]["path"]).write_text(text, encoding="utf-8", newline="")
    site.run()
    counts = site.counts("B2")
    assert counts["source_rows"] == sum(1 for line in [good, *lines] if line.encode().strip())
    assert counts["prompts"] == len(ids(site.prepared("B2").prompt_ids)) >= 1
