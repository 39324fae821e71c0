from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.browser import SHARED_BROWSER, SharedBrowser


@pytest.fixture(scope="module")
def browser() -> Iterator[SharedBrowser]:
    """Closed with the module, because other modules of this folder run event loops."""
    yield SHARED_BROWSER
    SHARED_BROWSER.close()
