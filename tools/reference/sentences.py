"""Sentences of the source, for pages that are made of it."""

from __future__ import annotations

import ast
import inspect
import textwrap

import msgspec


def sentences(record: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring below each field of a record."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(body, ast.ClassDef)
    sentence_by_field: dict[str, str] = {}
    key = ""
    for statement in body.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                key = name
            case ast.Expr(value=ast.Constant(value=str(words))) if key:
                sentence_by_field[key] = " ".join(words.split())
                key = ""
            case _:
                key = ""
    return sentence_by_field


def wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(" ".join(text.split()), 120)) + "\n"


def cell(text: str) -> str:
    """Of a table."""
    return text.replace("|", "\\|")
