"""The owners of which control groups are left on this machine."""

from __future__ import annotations

import contextlib

from tangram.managers.sandboxes.cgroups.groups import ROOT_GROUP_NAME
from tangram.managers.sandboxes.cgroups.hierarchies import find_hierarchies, writable_directories


def owner_names() -> list[str]:
    """The names for which `tangram/<name>` exists, dead or alive; sorted."""
    names: set[str] = set()
    for directory in writable_directories(find_hierarchies()).values():
        with contextlib.suppress(FileNotFoundError):
            names.update(entry.name for entry in (directory / ROOT_GROUP_NAME).iterdir() if entry.is_dir())
    return sorted(names)
