"""One name, one thing: a grep for a class returns one definition."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "tangram"
DESCRIBED = re.compile(r"`([A-Za-z_]\w*)`(?=: | is | gets )")


def test_no_two_classes_share_a_name() -> None:
    places_by_name = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places_by_name[node.name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: places for name, places in places_by_name.items() if len(places) > 1} == {}


def test_a_docstring_names_only_what_its_module_has() -> None:
    """Catches a parameter that was renamed while "`name`: ..." in the docstring of its function was not."""
    unknown = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if not DESCRIBED.search(text):
            continue
        tree = ast.parse(text)
        names = set()
        for node in ast.walk(tree):
            match node:
                case (
                    ast.Name(id=str(name))
                    | ast.Attribute(attr=str(name))
                    | ast.arg(arg=str(name))
                    | ast.keyword(arg=str(name))
                    | ast.Constant(value=str(name))
                    | ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                ):
                    names.add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                described = DESCRIBED.findall(ast.get_docstring(node) or "")
                unknown += [
                    f"{path.relative_to(SOURCE)}:{node.lineno}: {name}" for name in described if name not in names
                ]
    assert unknown == []
