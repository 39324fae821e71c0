"""The outputs that the documentation shows: docs/outputs.py pastes what is printed, where it is marked."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from tools.reference.pages import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def outputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("outputs", ROOT / "docs/outputs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fenced(language: str, *lines: str, mark: str = "") -> str:
    return "\n".join([*([f"<!-- {mark} -->"] if mark else []), f"```{language}", *lines, "```", ""])


def test_below_each_command_stands_what_it_prints(outputs: ModuleType, tmp_path: Path) -> None:
    page = fenced("console", "$ echo one; echo", "old", "$ echo two", "older", mark="output")
    document = fenced("console", "$ echo one; echo", "one", "$ echo two", "two", mark="output")
    assert outputs.renewed(page, outputs.Shell(tmp_path)) == document
    assert outputs.renewed(document, outputs.Shell(tmp_path)) == document


def test_a_command_may_stand_for_another_one(outputs: ModuleType, tmp_path: Path) -> None:
    page = fenced("console", "$ make run", "old", mark="output: echo three")
    assert outputs.renewed(page, outputs.Shell(tmp_path)) == page.replace("old", "three")


def test_what_a_block_writes_is_there_for_the_next(outputs: ModuleType, tmp_path: Path) -> None:
    python = fenced("python", "from pathlib import Path", 'Path("a").write_text("from a file")')
    page = python + fenced("console", "$ cp a b", mark="run") + fenced("console", "$ cat b", mark="output")
    assert "$ cp a b\n```" in outputs.renewed(page, outputs.Shell(tmp_path))
    assert "$ cat b\nfrom a file\n```" in outputs.renewed(page, outputs.Shell(tmp_path))


def test_a_text_block_shows_what_the_python_before_it_prints(outputs: ModuleType, tmp_path: Path) -> None:
    page = fenced("python", "x = 1") + fenced("python", "print(x + 1)") + fenced("text", "old", mark="output")
    assert outputs.renewed(page, outputs.Shell(tmp_path)) == page.replace("old", "2")


def test_nothing_of_a_page_without_marks_is_run_or_changed(outputs: ModuleType, tmp_path: Path) -> None:
    page = fenced("python", "1 / 0") + fenced("console", "$ touch here") + fenced("text", "old")
    assert outputs.renewed(page, outputs.Shell(tmp_path)) == page
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_fails_stops_everything_and_is_named(outputs: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        outputs.renewed(fenced("console", "$ exit 3", mark="output"), outputs.Shell(tmp_path))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_console_output_of_the_documentation_is_marked(outputs: ModuleType, document: Path) -> None:
    for block in outputs.BLOCK.finditer(document.read_text(encoding="utf-8")):
        lines = block["text"].splitlines()
        if block["language"] == "console" and not all(line.startswith("$ ") for line in lines):
            assert block["mark"] == "output", f"nothing keeps this true: {lines[0]}"
