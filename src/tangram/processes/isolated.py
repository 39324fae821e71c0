"""Isolated programs: modules of this package that run without site-packages and import only the standard library.

For processes that fork into sandboxes or read hostile files: nothing that is installed on the machine runs in them, and
they start in milliseconds. Such a module may import others of its kind, and has a function `main`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType


def isolated_argv(module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command line that runs `main` of a module, with the arguments in `sys.argv[1:]`. `options`: of Python."""
    return [sys.executable, "-I", "-S", *options, __file__, module, *arguments]


if __name__ == "__main__":
    _package = ModuleType("tangram")  # found without running its __init__.py
    _package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["tangram"] = _package
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()
