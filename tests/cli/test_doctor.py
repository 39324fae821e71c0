"""`tangram doctor`, as its users call it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.owner_cgroups import owner_names

from tangram.managers.sandboxes.cgroups.hierarchies import find_hierarchies

needs_root = pytest.mark.skipif(os.geteuid() != 0 and os.environ.get("CI") != "true", reason="needs root")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory that does not exist yet, and a place for temporary files that is watched."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TANGRAM_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def left_by_us() -> list[str]:
    return [name for name in owner_names() if name.startswith(f"{os.getpid()}-")]


def places(own: Path) -> list[str]:
    """Where this process is, what is mounted there, and which controllers version 2 has enabled at the top. Other tests
    mount at the same time, each in a folder of its own: `own` is that of this one."""
    enabled = [path / "cgroup.subtree_control" for path in set(find_hierarchies().by_controller.values())]
    others = f"/{own.parents[1].name}/"
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    mine = [line for line in mounts if others not in line or f"{own}/" in line]
    return [*mine, *(path.read_text() for path in (Path("/proc/self/cgroup"), *enabled) if path.exists())]


@needs_root
def test_a_machine_that_has_all_opens_a_sandbox_and_exits_with_0(cli) -> None:
    done = cli("doctor")
    assert (done.code, done.err) == (0, "")
    for words in ("bubblewrap", "overlayfs", "cgroup memory", "user namespaces", "state directory", "docker engine"):
        assert words in done.out
    assert "backends that work: sandbox" in done.out
    assert "opened a sandbox in " in done.out


@needs_root
def test_json_has_the_same_content(cli) -> None:
    done = cli("doctor", "--json")
    assert (done.code, done.err) == (0, "")
    document = done.json
    assert document["backends"]["sandbox"] == {"usable": True, "why_not": ""}
    assert document["backends"]["process"]["usable"]
    assert set(document["trial"]) == {"start_s", "open_s", "exec_s", "close_s"}
    states = {each["component"]: each["state"] for each in document["components"]}
    assert states["bubblewrap"] == states["overlayfs"] == states["cgroup freezer"] == "ok"
    assert document["install"] == ""


@needs_root
def test_nothing_is_left_on_the_machine(cli, state: Path, tmp_path: Path) -> None:
    before = places(tmp_path)
    assert cli("doctor").code == 0
    assert not state.exists()
    assert os.listdir(tempfile.gettempdir()) == []
    assert left_by_us() == []
    assert places(tmp_path) == before


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with the programs that sandboxes need and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bwrap", "catatonit", "setpriv", "cp"):
        path = shutil.which(name)
        if path is not None:
            (folder / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_a_missing_program_is_listed_with_the_command_that_installs_it(cli, programs: Path) -> None:
    for name in ("bwrap", "catatonit"):
        (programs / name).unlink(missing_ok=True)
    done = cli("doctor")
    assert done.code == 1
    assert "apt-get install -y bubblewrap catatonit\n" in done.out
    assert "backends that work: process" in done.out
    assert "sandbox does not work: " in done.out and "bubblewrap: no program bwrap" in done.out
    result = cli("doctor", "--json")
    assert result.code == 1
    assert result.json["trial"] is None
    assert result.json["install"].endswith("apt-get install -y bubblewrap catatonit")
    assert not result.json["backends"]["sandbox"]["usable"]


@needs_root
def test_the_trial_has_the_last_word(cli, programs: Path) -> None:
    (programs / "bwrap").unlink()
    (programs / "bwrap").write_text("#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.8.0 && exit 0\nexit 1\n")
    (programs / "bwrap").chmod(0o755)
    done = cli("doctor")
    assert done.code == 1
    assert "sandbox does not work: opening a sandbox failed: " in done.out
    assert "backends that work: process" in done.out
    assert left_by_us() == []
    assert os.listdir(tempfile.gettempdir()) == []


def test_the_help_has_examples(cli) -> None:
    done = cli("doctor", "--help")
    assert done.code == 0 and "tangram doctor --json" in done.out
