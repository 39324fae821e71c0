"""The generated pages of the documentation are what their generators write."""

from __future__ import annotations

import pytest
from tools.reference import pages

from tangram.core.action import TRANSITIONS


@pytest.mark.parametrize("name", list(pages.PAGES))
def test_the_generated_pages_are_up_to_date(name: str) -> None:
    assert (pages.ROOT / name).read_text() == pages.PAGES[name](), "run `make docs`"


def test_every_option_and_every_transition_is_in_its_page() -> None:
    page = pages.cli_page()
    for words in ("## tangram sim", "## tangram trace story", "`--memory-per-core GIB`", r"`--target mean\|p95`"):
        assert words in page
    assert page.count("$ tangram ") >= 12
    states = pages.states_page()
    for before, afters in TRANSITIONS.items():
        for after in afters:
            assert f"{before.value} --> {after.value}" in states
