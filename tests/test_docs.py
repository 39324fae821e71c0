"""The documentation is true: its Python runs, its links lead somewhere, and the commands it shows exist.

There is no mark that keeps a block from running. An example that cannot run is not an example. Blocks that open real
sandboxes need root and bubblewrap: without them the rest of a document is skipped, which under CI=true is a failure.
"""

from __future__ import annotations

import functools
import html.parser
import itertools
import os
import re
import shutil
import sys
import types
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tangram.errors import ManagerError
from tangram.managers.sandboxes.bwrap.manager import PROGRAMS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

OTHER_NAMES_OF_PYTHON = ("py", "py3", "python3", "pycon", "ipython")
"""A block under one of these would look like Python and not be run."""

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


# Reading Markdown.


class Block(NamedTuple):
    """A fenced block."""

    language: str
    line: int
    """The line of the document that holds its first line of text, counted from 1."""
    text: str


@functools.cache  # several tests read each document, and each of its links to itself does
def tokens_of(text: str) -> list[Token]:
    """Every token of a document, those inside paragraphs included."""
    names = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        names += [token, *(token.children or [])]
    return names


def blocks_of(text: str) -> list[Block]:
    names = []
    for token in tokens_of(text):
        if token.type == "fence":
            words = token.info.lower().split()
            # The map starts at the opening fence and counts from 0; the text starts one line below.
            names.append(Block(words[0] if words else "", token.map[0] + 2, token.content))
    return names


class _Attributes(html.parser.HTMLParser):
    """The links and anchors of a piece of HTML inside Markdown."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src", "srcset"):
                self.links.append(value or "")
            elif name in ("id", "name"):
                self.anchors.append(value or "")


def links_of(text: str) -> list[str]:
    names = []
    for token in tokens_of(text):
        if token.type == "link_open":
            names.append(str(token.attrs["href"]))
        elif token.type == "image":
            names.append(str(token.attrs["src"]))
        elif token.type in ("html_block", "html_inline"):
            names += _Attributes(token.content).links
    return names


@functools.cache
def anchors_of(text: str) -> list[str]:
    """Where `#...` can point in a document, by the rules of GitHub."""
    lines: list[str] = []
    tokens = tokens_of(text)
    for before, token in itertools.pairwise(tokens):
        if before.type == "heading_open":
            heading = "".join(part.content for part in token.children or [] if part.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
            repeats = sum(re.fullmatch(re.escape(slug) + r"(-\d+)?", anchor) is not None for anchor in lines)
            lines.append(f"{slug}-{repeats}" if slug in lines else slug)
        elif token.type in ("html_block", "html_inline"):
            lines += _Attributes(token.content).anchors
    return lines


# The three checks.


def run_blocks(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python of one document from top to bottom, as one program."""
    # As __main__ and in sys.modules: so `if __name__ == "__main__"` runs, and annotations and pickles find their names.
    program = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)
    for block in blocks_of(document.read_text(encoding="utf-8")):
        assert block.language not in OTHER_NAMES_OF_PYTHON, (
            f"{document}:{block.line}: call the language of this block python, so that it is run"
        )
        if block.language == "python":
            # Moved down to its own line, so that a traceback names and shows the line of the document.
            padded = "\n" * (block.line - 1) + block.text
            exec(compile(padded, str(document), "exec", dont_inherit=True), vars(program))


def missing_for_sandboxes() -> str:
    """What this machine lacks for blocks that open real sandboxes; empty if nothing."""
    if os.geteuid() != 0:
        return "root"
    return ", ".join(name for name in PROGRAMS if shutil.which(name) is None)


def run_where_possible(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `run_blocks`; a machine that cannot have sandboxes skips the rest of a document that wants one."""
    try:
        run_blocks(document, monkeypatch)
    except ManagerError as error:
        missing = missing_for_sandboxes()
        if not missing or os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{missing} is missing: {error}")


def broken_links(document: Path, root: Path) -> list[str]:
    names = []
    for link in links_of(document.read_text(encoding="utf-8")):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (document.parent / unquote(parts.path)).resolve() if parts.path else document
        if not target.is_relative_to(root):
            names.append(f"{link}: leads out of the project")
        elif not target.exists():
            names.append(f"{link}: no such file")
        elif parts.fragment and not has_anchor(target, unquote(parts.fragment)):
            names.append(f"{link}: the file has no such anchor")
    return names


def has_anchor(target: Path, anchor: str) -> bool:
    if target.is_dir():
        return False
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return anchor in anchors_of(text)
    lines = re.fullmatch(r"L(\d+)(?:-L(\d+))?", anchor)
    return lines is not None and max(int(line) for line in lines.groups() if line) <= len(text.splitlines())


def verbs_shown(text: str) -> list[str]:
    """The verb of each `$ tangram VERB` in a console block. `$ tangram --help` has none."""
    return [
        verb
        for block in blocks_of(text)
        if block.language == "console"
        for verb in re.findall(r"^\$ tangram +([^-\s]\S*)", block.text, flags=re.MULTILINE)
    ]


def verbs_of_the_command() -> list[str]:
    """The verbs that `tangram --help` lists."""
    from typer.main import get_command

    from tangram.cli import app

    return [name for name, command in get_command(app).commands.items() if not command.hidden]


@each_document
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANGRAM_STATE", str(tmp_path / "state"))
    run_where_possible(document, monkeypatch)
    assert list(tmp_path.glob("state/owners/*")) == [], "the sandboxes of an example must end with it"


@each_document
def test_relative_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document, ROOT) == []


SANDBOXES = ROOT / "src" / "tangram" / "managers" / "sandboxes"
PACKAGES = sorted(
    path for path in (ROOT / "src" / "tangram").rglob("*") if path.is_dir() and (path / "__init__.py").exists()
)


def missing_files(text: str, folder: Path) -> list[str]:
    """Names of files in backticks that exist neither in the folder nor below the package or the project."""
    places = (folder, ROOT / "src" / "tangram", ROOT, ROOT / "tests", SANDBOXES, SANDBOXES / "bwrap")
    names = re.findall(r"`([\w./*-]+\.(?:py|js|html|toml|md))`", text)
    return [name for name in names if not any(any(place.glob(name)) for place in places)]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_package_has_a_readme_that_names_files_that_exist(package: Path) -> None:
    text = (package / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 20, "a README of a package is about ten lines"
    assert missing_files(text, package) == []


def missing_places(text: str, package: Path) -> list[str]:
    """Of a table of places, the files, folders and identifiers that do not exist. A file without a folder is in that of
    the file before it."""
    missing: list[str] = []
    for row in re.findall(r"^\|[^|]+\|(.+)\|$", text, re.MULTILINE):
        path = package
        for name in re.findall(r"`([^`]+)`", row):
            if not name.endswith(("/", ".py")):  # an identifier in the file before it
                found = all(re.search(rf"(def|class) {part}\b", path.read_text()) for part in name.split("."))
            else:
                folder = path if path.is_dir() else path.parent
                path = next((each for each in (package / name, folder / name) if each.exists()), path)
                found = path.match(name.rstrip("/"))
            missing += [] if found else [name]
    return missing


def test_the_table_of_places_is_true(tmp_path: Path) -> None:
    package = ROOT / "src" / "tangram"
    text = (package / "README.md").read_text(encoding="utf-8")
    assert text.count("\n| ") > 10 and missing_places(text, package) == []
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "file.py").write_text("class Box:\n    def open(self) -> None: ...\n")
    wrong = "| a | `part/file.py` (`Box.open`); `part/no.py` |\n| b | `part/file.py` (`shut`); `no/`; `file.py` |\n"
    assert missing_places(wrong, tmp_path) == ["part/no.py", "shut", "no/"]


@pytest.mark.parametrize("page", ["architecture", "journey-of-an-action", "sandbox", "simulator", "papers-to-code"])
def test_pages_on_internals_name_files_that_exist(page: str) -> None:
    path = ROOT / "docs" / "internals" / f"{page}.md"
    assert missing_files(path.read_text(encoding="utf-8"), path.parent) == []


def test_a_missing_file_is_detected(tmp_path: Path) -> None:
    assert missing_files("`core/ledger.py`, `core/no_ledger.py`, `rl*.py`", tmp_path) == ["core/no_ledger.py", "rl*.py"]


def explained(text: str) -> list[tuple[str, list[str]]]:
    """Each `$ tangram ... --explain` of a config that the project has, with the lines that follow it."""
    shown = [block.text.splitlines() for block in blocks_of(text) if block.language == "console"]
    return [(lines[0], lines[1:]) for lines in shown if re.match(r"\$ tangram .*\bexamples/\S+ --explain$", lines[0])]


@each_document
def test_a_quoted_explanation_is_what_the_command_prints(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from tangram.cli import app

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for command, lines in explained(document.read_text(encoding="utf-8")):
        result = CliRunner().invoke(app, command.removeprefix("$ tangram ").split())
        printed = [line for line in result.output.splitlines() if not line.startswith("! sandboxes need root")]
        assert printed == lines, command


@each_document
def test_commands_shown_exist(document: Path) -> None:
    shown = verbs_shown(document.read_text(encoding="utf-8"))
    if shown:
        verbs = verbs_of_the_command()
        assert [verb for verb in shown if verb not in verbs] == []


# The checks on small documents, so that each of them is known to be able to fail.


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.md"


def test_blocks_share_one_namespace_and_run_as_the_main_program(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.write_text(
        "```python\nx = 1\n```\n\n- a list\n\n  ```python no-run\n  assert (x, __name__) == (2, '__main__')\n  ```\n"
    )
    with pytest.raises(AssertionError):
        run_blocks(page, monkeypatch)
    page.write_text(page.read_text().replace("x = 1", "x = 2"))
    run_blocks(page, monkeypatch)


def test_a_failing_block_points_at_its_line(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.write_text("# Page\n\n```python\nfine = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as failure:
        run_blocks(page, monkeypatch)
    last = failure.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(page), 5)


def test_only_a_machine_that_cannot_have_sandboxes_skips_them(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.write_text("```python\nfrom tangram.errors import ManagerError\nraise ManagerError('none')\n```\n")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="root is missing"):
        run_where_possible(page, monkeypatch)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(ManagerError):
        run_where_possible(page, monkeypatch)
    monkeypatch.delenv("CI")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(ManagerError):
        run_where_possible(page, monkeypatch)


@pytest.mark.parametrize("name", OTHER_NAMES_OF_PYTHON)
def test_no_block_escapes_under_another_name(name: str, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.write_text(f"```{name}\nx = 1\n```\n")
    with pytest.raises(AssertionError, match="call the language"):
        run_blocks(page, monkeypatch)


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ("[a](other.md)", None),
        ("[a](other.md#two-words-and-code)", None),
        ("[a](other.md#two-words-and-code-1)", None),
        ("[a](other.md#by-hand)", None),
        ("[a](#here)", None),
        ("[a](code.py#L2)", None),
        ("[a](https://example.org/missing.md)", None),
        ("![a](missing.png)", "no such file"),
        ("[a](missing.md)", "no such file"),
        ("[a][ref]\n\n[ref]: missing.md", "no such file"),
        ("<img src='missing.svg'>", "no such file"),
        ("| a |\n|---|\n| [a](missing.md) |", "no such file"),
        ("[a](other.md#nowhere)", "no such anchor"),
        ("[a](#nowhere)", "no such anchor"),
        ("[a](code.py#L3)", "no such anchor"),
        ("[a](../outside.md)", "leads out of the project"),
        ("`[a](missing.md)`", None),
    ],
)
def test_links_are_followed(link: str, complaint: str | None, page: Path) -> None:
    heading = "## Two words, and `code`\n\n"
    (page.parent / "other.md").write_text(f'{heading}{heading}<a id="by-hand"></a>\n')
    (page.parent / "code.py").write_text("one = 1\ntwo = 2\n")
    page.write_text(f"# Here\n\n{link}\n")
    links = broken_links(page, page.parent)
    assert [line.partition(": ")[2].endswith(complaint or "") for line in links] == ([True] if complaint else [])


def test_verbs_are_read_from_console_blocks_alone() -> None:
    console = "```console\n$ tangram sim coding --batch 2\nmean 3 s\n$ tangram --help\n$ tangram plan\n```\n"
    text = f"{console}\n```text\n$ tangram no\n```\n"
    assert verbs_shown(text) == ["sim", "plan"]
