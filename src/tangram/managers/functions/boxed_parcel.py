"""What goes into an instance sandbox when it is opened: the program, a library, and the function.

Owns which files these are. Reads nothing of a tenant: the function is bytes that are only opened inside.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import pickle
import py_compile
import re
import sys
import tarfile
import tempfile
from pathlib import Path

from tangram.managers.functions.boxed_program import DIRECTORY, LIBRARY, PACKAGE, SPEC
from tangram.managers.functions.work import ANSWER_BYTES_MAX, FunctionSpec
from tangram.managers.work import WORKSPACE

PROGRAMS = ("template", "boxed_msgpack", "boxed_program")
PACKAGE_START = b"""\
from . import boxed_msgpack
standing = boxed_msgpack.stand_in()
from . import template
boxed_msgpack.step_back(standing)
"""
"""The package of the programs inside: `template` finds msgspec, or what stands in for it."""
LIBRARIES = ("cloudpickle",)
"""What functions by value are read with, in the version that the service has."""
ZIP = re.compile(r"/python(\d)(\d{1,3})\.zip$")
"""The place in every search path of modules that names the version."""


def parcel(spec: FunctionSpec, *, image: str, disk_bytes: int) -> io.BytesIO:
    """As a tar, for DIRECTORY."""
    said = {
        "name": spec.name,
        "module": spec.module,
        "qualname": spec.qualname,
        "pickled": spec.pickled,
        "memory_bytes": spec.memory_bytes,
        "answer_bytes_max": ANSWER_BYTES_MAX,
        "disk_bytes": disk_bytes,
        "image": image,
        "python": pickled_by(spec),
    }
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name, content in _programs():
            _add(archive, name, content)
        _add(archive, SPEC, pickle.dumps(said, protocol=4))
    tar.seek(0)
    return tar


def pickled_by(spec: FunctionSpec) -> tuple[int, int] | None:
    """The Python that made the function, as far as its search path tells."""
    for path in spec.paths:
        if (found := ZIP.search(path)) is not None:
            return int(found[1]), int(found[2])
    return None


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))


@functools.cache
def _programs() -> tuple[tuple[str, bytes], ...]:
    found: dict[str, bytes] = {f"{PACKAGE}/__init__.py": PACKAGE_START}
    for name in PROGRAMS:
        found[f"{PACKAGE}/{name}.py"] = Path(__file__).with_name(f"{name}.py").read_bytes()
    for library in LIBRARIES:
        place = importlib.util.find_spec(library)
        for folder in (place.submodule_search_locations or ()) if place is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                found[f"{LIBRARY}/{library}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return (*found.items(), *_compiled(found).items())


def _compiled(sources: dict[str, bytes]) -> dict[str, bytes]:
    """For the same Python as ours, which need not compile them anew; another one looks at the sources."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "source.py"), Path(directory, "target.pyc")
        for name, content in sources.items():
            source.write_bytes(content)
            shown = f"{WORKSPACE}/{DIRECTORY}/{name}"
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(source), str(target), shown, doraise=True, invalidation_mode=mode)
            folder, _, file = name.rpartition("/")
            cached = f"{folder}/__pycache__/{file[: -len('.py')]}.{sys.implementation.cache_tag}.pyc"
            found[cached] = target.read_bytes()
    return found
