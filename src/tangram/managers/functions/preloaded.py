"""Imported by the fork server of a function: loads the function once, for all instances that are forked from it."""

import os
import pickle
from collections.abc import Callable
from typing import Any

from tangram.managers.functions.program import SPEC_VARIABLE, load

SPEC: dict[str, Any] = {}
FUNCTION: Callable[..., Any] | None = None

if SPEC_VARIABLE in os.environ:
    with open(os.environ[SPEC_VARIABLE], "rb") as _file:
        SPEC = pickle.load(_file)
    FUNCTION = load(SPEC)
