"""Packages that tests import at their first use, because every worker of a test run collects all test modules."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import Any

import pytest


class LazyExtra:
    """The package `name`. Where it is not installed, the test module that creates this is skipped, but fails in CI."""

    def __init__(self, name: str) -> None:
        self._name = name
        if os.environ.get("CI") != "true" and find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is an extra, which is not installed", allow_module_level=True)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
