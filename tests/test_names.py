"""Names and language: a grep for a class returns one definition, and the text is in plain modern English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tangram"
DESCRIBED = re.compile(r"`([A-Za-z_]\w*)`(?=: | is | gets )")
MENTIONED = re.compile(
    r"(?<![\w-])(?:`([A-Za-z_]\w*)`|([A-Z][a-z]{2,}[A-Z][a-z]{2,}\w*)|([A-Z][A-Z0-9]*_[A-Z0-9_]+))(?![\w-])"
)
"""`name`, CapWords, UPPER_CASE"""
BANNED_WORDS = (
    "afresh", "all the same", "anew", "anybody", "apart from", "as far as", "as good as", "besides", "carries out",
    "carried out", "carry out", "for ever", "given up", "gives up", "he", "him", "his", "hither", "in the making",
    "in vain", "is told", "are told", "was told", "were told", "lest", "live on", "lives on", "looked after",
    r"nobody(?!:)", "once more", "she", "so many", "somebody", "stands", "that is none", "thereof", "whatever",
    "whoever", "whom",
)  # fmt: skip
"""Archaic and literary words, and words for persons: subjects are things. `nobody:` is the user in /etc/passwd."""
BANNED = re.compile(rf"(?<![\w-])(?:{'|'.join(BANNED_WORDS)})(?![\w-])".replace(" ", r"\s+(?:# |// )?"), re.IGNORECASE)
RECORDED = ("results.md", "results.jsonl")
"""The output of earlier benchmark runs is not edited."""
TEXT_SUFFIXES = (".py", ".md", ".js", ".css", ".html", ".toml", ".service", "Containerfile", ".json")


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


def test_a_module_docstring_names_only_what_exists() -> None:
    """Catches a class, function or constant that was renamed while a mention of it was not. Indented blocks show output
    or other languages, so they are not read."""
    mentioned, existing = {}, set()
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        docstring = ast.get_docstring(tree) or ""
        prose = "\n".join(line for line in docstring.splitlines() if not line.startswith("    "))
        mentioned |= {f"{path.relative_to(SOURCE)}: {name}": name for name in _mentions(prose)}
        existing |= {path.stem, *_names_in_code(text, tree)}
    assert len(mentioned) > 200
    assert [place for place, name in mentioned.items() if name not in existing] == []


def test_a_mention_of_a_missing_name_is_found() -> None:
    text = '"""Sends `Gone`, OldClass and OLD_MAX to NewClass."""\nclass NewClass:\n    """Was OldClass."""\n'
    tree = ast.parse(text)
    mentions = _mentions(ast.get_docstring(tree) or "")
    assert sorted(set(mentions) - _names_in_code(text, tree)) == ["Gone", "OLD_MAX", "OldClass"]


def _mentions(prose: str) -> list[str]:
    return [next(filter(None, match.groups())) for match in MENTIONED.finditer(prose)]


def _names_in_code(text: str, tree: ast.Module) -> set[str]:
    """All identifiers, and the words of all strings that are not docstrings."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    names = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.start not in docstrings and token.type != tokenize.COMMENT:
            names.update(re.findall(r"\w+", token.string))
    return names


def test_the_text_has_no_banned_words() -> None:
    places = []
    for folder in ("src", "docs", "deploy"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.name.endswith(TEXT_SUFFIXES) and path.name not in RECORDED:
                text = path.read_text()
                places += [
                    f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
                    for match in BANNED.finditer(text)
                ]
    assert places == []


def test_a_banned_word_is_found_across_lines_but_not_inside_others() -> None:
    assert [
        match[0] for match in BANNED.finditer("# as far\n# as it goes; NOBODY; nobody:x:1; history, withstands")
    ] == [
        "as far\n# as",
        "NOBODY",
    ]
