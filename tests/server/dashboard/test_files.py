"""What can be said of the dashboard's files without a browser."""

from __future__ import annotations

import re

import pytest
from tests.server.dashboard.fake_service import FILES

SCRIPTS = sorted(FILES.glob("*.js"))
ALL = sorted(path for path in FILES.iterdir() if path.is_file())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_module_opens_by_saying_what_it_owns(path) -> None:
    first = path.read_text().splitlines()[0]
    name = path.stem.replace("_", " ")
    assert first.lower().startswith(f"// {name}:"), first


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_can_turn_text_into_markup_or_code(path) -> None:
    text = path.read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "new Function"):
        assert way not in text
    assert 'setAttribute("style"' not in text
    assert not re.search(r"\bwindow\.\w+ *=[^=]|globalThis", text), "nothing is exposed globally"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_nothing_is_loaded_from_elsewhere(path) -> None:
    addresses = re.findall(
        r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.M)
    )
    assert [one for one in addresses if "www.w3.org" not in one] == []


def test_the_page_has_no_inline_script_or_style() -> None:
    page = (FILES / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)[^>]*>", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []
    for name in re.findall(r"(?:src|href)=\"dashboard/([^\"]+)\"", page):
        assert (FILES / name).exists()


def test_every_module_is_used_and_every_import_exists() -> None:
    imported = {name for path in SCRIPTS for name in re.findall(r"from \"\./([\w.]+)\"", path.read_text())}
    assert imported | {"main.js"} == {path.name for path in SCRIPTS}
