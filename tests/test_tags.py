"""Tags on disk and on the wire are written out in the class statement: renaming a class never changes a format.

msgspec does not record whether a tag was explicit, so these tests read the class statements.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator

import msgspec
import pytest

import tangram


def structs(above: type[msgspec.Struct] = msgspec.Struct) -> Iterator[type[msgspec.Struct]]:
    for kind in above.__subclasses__():
        yield kind
        yield from structs(kind)


@pytest.fixture(scope="module")
def tagged() -> list[type[msgspec.Struct]]:
    """The tagged records of all modules, including those that request a tag and get none."""
    for module in pkgutil.walk_packages(tangram.__path__, "tangram."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return [
        kind
        for kind in dict.fromkeys(structs())
        if kind.__module__.startswith("tangram.") and kind.__struct_config__.tag is not None
    ]


def written_tag(kind: type[msgspec.Struct]) -> object:
    """The value of `tag=` in the class statement; None if it has none or is not a literal."""
    (statement,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(statement, ast.ClassDef)
    (tag,) = [each.value for each in statement.keywords if each.arg == "tag"] or [ast.Constant(None)]
    return tag.value if isinstance(tag, ast.Constant) else None


def test_each_tagged_record_names_its_tag_in_its_class_statement(tagged: list[type[msgspec.Struct]]) -> None:
    implicit = [
        f"{kind.__module__}.{kind.__qualname__}: write tag={kind.__struct_config__.tag!r}"
        for kind in tagged
        if written_tag(kind) != kind.__struct_config__.tag
    ]
    assert len(tagged) > 90
    assert not implicit, "\n".join(implicit)


def test_a_subclass_of_an_untagged_base_names_a_tag(tagged: list[type[msgspec.Struct]]) -> None:
    """A base with `tag=False` passes its tag field on, but no tag: a subclass without one would be encoded untagged."""
    bases = {base for kind in tagged for base in kind.__mro__[1:] if base.__module__.startswith("tangram.")}
    untagged = [kind for base in bases for kind in structs(base) if kind not in tagged and not kind.__subclasses__()]
    assert not untagged


def test_an_implicit_tag_is_detected() -> None:
    class Implicit(msgspec.Struct, tag=True):
        pass

    class Inherited(Implicit):
        pass

    class Explicit(Implicit, tag="explicit"):
        pass

    assert written_tag(Implicit) != Implicit.__struct_config__.tag
    assert written_tag(Inherited) != Inherited.__struct_config__.tag
    assert written_tag(Explicit) == Explicit.__struct_config__.tag
