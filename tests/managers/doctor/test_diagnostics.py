"""The diagnosis of the machine: what it says is so, and the machine is as before.

The same tests run on both versions of control groups; `make test-cgroup-v2` runs them on a kernel with version 2.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram.core.demand import CORE
from tangram.managers.doctor import diagnostics
from tangram.managers.doctor.diagnostics import (
    DOCKER,
    LIMITED,
    MISSING,
    OK,
    PROCESS,
    SANDBOX,
    Diagnostic,
    MachineReport,
    diagnose,
)
from tangram.managers.sandboxes.cgroups.groups import create_owner_cgroup
from tangram.managers.sandboxes.cgroups.hierarchies import find_hierarchies, writable_directories

NEEDS = os.geteuid() == 0 or os.environ.get("CI") == "true"
needs_root = pytest.mark.skipif(not NEEDS, reason="needs root")
VERSION = find_hierarchies().version
needs_v2 = pytest.mark.skipif(
    VERSION != 2 or not NEEDS, reason="needs control groups of version 2: make test-cgroup-v2"
)


def of(report: MachineReport, component: str) -> Diagnostic:
    (finding,) = [each for each in report.findings if each.component == component]
    return finding


# ---- all of it ----------------------------------------------------------------------------------------------------


def test_every_component_is_listed_once_and_a_failed_check_names_the_remedy() -> None:
    findings = diagnose().findings
    names = [each.component for each in findings]
    assert len(set(names)) == len(names)
    expected = "python user cgroups namespaces overlayfs tmpfs bubblewrap catatonit setpriv seccomp cores memory swap"
    assert set(expected.split()) <= set(names)
    for each in findings:
        assert each.state in (OK, LIMITED, MISSING) and each.found
        assert each.state == OK or each.to_do, each


@needs_root
def test_a_machine_with_all_that_sandboxes_need_passes(tmp_path: Path) -> None:
    report = diagnose(tmp_path)
    assert report.unavailable_reason(SANDBOX) == ""
    assert report.unavailable_reason(PROCESS) == ""
    assert report.install_command == ""


def test_what_keeps_a_backend_from_working_is_what_it_needs_and_is_missing() -> None:
    findings = (
        Diagnostic(component="a", state=MISSING, found="no a", needed_by=(SANDBOX,), package="pa"),
        Diagnostic(component="b", state=LIMITED, found="half a b", needed_by=(SANDBOX,), package="pb"),
        Diagnostic(component="c", state=MISSING, found="no c", needed_by=(SANDBOX, DOCKER), package="pa"),
    )
    report = MachineReport(findings=findings)
    assert report.unavailable_reason(SANDBOX) == "a: no a; c: no c"
    assert report.unavailable_reason(DOCKER) == "c: no c"
    assert report.unavailable_reason(PROCESS) == ""
    assert report.install_command.removeprefix("sudo ") == "apt-get install -y pa"


def test_a_check_that_cannot_run_is_a_finding_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(diagnostics, "available_memory_bytes", broken)
    report = diagnose()
    assert of(report, "memory").state == LIMITED
    assert "cannot be examined" in of(report, "memory").found
    assert of(report, "swap").found


# ---- the machine stays as it is -----------------------------------------------------------------------------------


def leftovers_of_diagnose() -> list[str]:
    """Groups that only a diagnosis by this process could have left, and mounts outside the folders of tests."""
    hierarchies = dict.fromkeys(find_hierarchies().by_controller.values())
    groups = [str(path) for mount in hierarchies for path in mount.glob(f"tangram-doctor-{os.getpid()}")]
    own = Path("/proc/self/cgroup").read_text()
    enabled = [path.read_text() for mount in hierarchies for path in mount.glob("cgroup.subtree_control")]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return [*groups, own, *enabled, *(line for line in mounts if "/pytest-of-" not in line)]


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = leftovers_of_diagnose()
    state = tmp_path / "not" / "there"
    diagnose(state)
    assert leftovers_of_diagnose() == before
    assert os.listdir(temporary) == []
    assert not state.exists() and not state.parent.exists()


STEPS_DOWN = """
import json, os, sys
from pathlib import Path
from tangram.managers.sandboxes.cgroups.hierarchies import find_hierarchies, writable_directories
from tangram.managers.doctor.diagnostics import restoring_cgroups
print("ready", flush=True)
sys.stdin.readline()
with restoring_cgroups():
    at = writable_directories(find_hierarchies())
    inside = Path("/proc/self/cgroup").read_text()
print(json.dumps([str(at["cpu"]), inside, Path("/proc/self/cgroup").read_text()]))
"""


@needs_v2
def test_a_process_that_stepped_down_steps_up_again() -> None:
    above = writable_directories(find_hierarchies())["cpu"]
    group = above / f"tangram-test-{os.getpid()}"
    group.mkdir()
    try:
        os.setxattr(group, "trusted.delegate", b"1")
        process = subprocess.Popen(
            [sys.executable, "-c", STEPS_DOWN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (group / "cgroup.procs").write_text(str(process.pid))
        out, _ = process.communicate("go\n", timeout=60)
        at, inside, after = json.loads(out)
        assert at == str(group)
        assert inside == f"0::/{group.name}/tangram-owner\n"
        assert after == f"0::/{group.name}\n"
        assert (group / "cgroup.subtree_control").read_text().split() == []
        assert not (group / "tangram-owner").exists()
    finally:
        group.rmdir()


# ---- programs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of its own, with all programs of sandboxes; each says its version."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, says in {
        "bwrap": "bubblewrap 0.8.0",
        "catatonit": "tini version 0.1.7",
        "setpriv": "2.38",
        "cp": "9.1",
    }.items():
        make_program(folder / name, f"echo {says}")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def make_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_missing_programs_are_installed_with_one_command(programs: Path) -> None:
    for name in ("bwrap", "catatonit"):
        (programs / name).unlink()
    report = diagnose()
    assert of(report, "bubblewrap").state == MISSING and of(report, "catatonit").state == MISSING
    assert of(report, "setpriv").state == OK
    assert report.install_command.removeprefix("sudo ") == "apt-get install -y bubblewrap catatonit"
    assert "bubblewrap: no program bwrap" in report.unavailable_reason(SANDBOX)


def test_versions_are_reported(programs: Path) -> None:
    assert of(diagnose(), "bubblewrap").found == f"0.8.0 ({programs}/bwrap)"


def test_a_bubblewrap_that_is_too_old_will_not_do(programs: Path) -> None:
    make_program(programs / "bwrap", "echo bubblewrap 0.6.1")
    finding = of(diagnose(), "bubblewrap")
    assert finding.state == MISSING and "0.6.1" in finding.found and "0.7 or later" in finding.to_do


@pytest.mark.parametrize("script", ["exit 1", "exec /bin/sleep 1000", "printf '\\377\\376'"])
def test_a_program_without_a_version_is_still_reported(
    programs: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "PROGRAM_S", 0.2)
    make_program(programs / "catatonit", script)
    finding = of(diagnose(), "catatonit")
    assert finding.state == OK and "unknown version" in finding.found


# ---- the state directory ------------------------------------------------------------------------------------------


def test_what_dead_owners_left_is_counted_and_stays(tmp_path: Path) -> None:
    owners = tmp_path / "owners"
    for name in ("dead", "living", "half-made", "service.1234/kept"):
        (owners / name).mkdir(parents=True)
    (owners / "dead" / "lock").touch()
    (owners / "service.1234" / "lock").touch()
    with (
        (owners / "living" / "lock").open("w") as lock,
        (owners / "service.1234" / "kept" / "spawner.lock").open("w") as spawner,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(spawner, fcntl.LOCK_EX)
        description = of(diagnose(tmp_path), "state directory").found
    assert "1 in use" in description and "2 left by dead owners" in description
    assert "1 with sandboxes that the next start" in description
    assert sorted(path.name for path in owners.iterdir()) == ["dead", "half-made", "living", "service.1234"]


@needs_root
@pytest.mark.parametrize("wrong", ["a:b", "a,b", "file"])
def test_an_unusable_state_directory_is_reported_with_the_reason(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "file").touch()
    finding = of(diagnose(tmp_path / wrong), "state directory")
    assert finding.state == MISSING and "TANGRAM_STATE" in finding.to_do


# ---- limits of this process ---------------------------------------------------------------------------------------

LOOKS = """
import msgspec, sys
from tangram.managers.doctor.diagnostics import diagnose
sys.stdout.buffer.write(msgspec.json.encode({each.component: each for each in diagnose().findings}))
"""


@needs_root
def test_a_quota_and_a_memory_limit_of_this_process_are_reported() -> None:
    name = f"test-{os.getpid()}-diagnose"
    owner = create_owner_cgroup(name)
    try:
        group = owner.child("limited")
        group.set_cpu(reserved=CORE, limit=CORE // 2)
        group.set_memory(512 << 20)
        joins = "".join(f"echo 0 > {path}\n" for path in group.join_files)
        words = ["/bin/sh", "-c", f'{joins}exec "$0" -c "$1"', sys.executable, LOOKS]
        done = subprocess.run(words, capture_output=True, check=True, timeout=120)
    finally:
        owner.remove()
    document = json.loads(done.stdout)
    assert document["cores"]["state"] == LIMITED and "quota 0.5" in document["cores"]["found"]
    assert document["memory"]["state"] == LIMITED and "limit 512 MiB" in document["memory"]["found"]


# Looks once as root, so that all that Python needs is in memory: its files may be out of reach for others.
DIAGNOSES_UNPRIVILEGED = """
import os
from tangram.managers.doctor.diagnostics import diagnose
diagnose()
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
os.environ["PATH"] = "/nowhere"
found = diagnose()
print(found.unavailable_reason("sandbox").split("; ")[0])
print(found.unavailable_reason("process") or "process works")
print(found.install_command)
"""


@needs_root
def test_without_root_all_is_looked_at_and_the_command_has_sudo() -> None:
    done = subprocess.run([sys.executable, "-c", DIAGNOSES_UNPRIVILEGED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    user, process, install = done.stdout.splitlines()
    assert user.startswith("user: ") and "not root" in user
    assert process == "process works"
    assert install == "sudo apt-get install -y bubblewrap catatonit util-linux coreutils"


# ---- Docker -------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """A socket that answers once with whatever is put into the list; it closes without an answer if there is none."""
    path = str(tmp_path / "docker.sock")
    monkeypatch.setattr(diagnostics, "DOCKER_SOCKET", path)
    answers: list[bytes] = []

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            if answers:
                connection.sendall(answers[0])

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        server = threading.Thread(target=serve)
        server.start()
        yield answers
        server.join(60)
        assert not server.is_alive()


def test_an_engine_that_answers_is_reported_with_its_version(engine: list[bytes]) -> None:
    body = b'{"Version": "27.1", "ApiVersion": "1.46"}'
    engine.append(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert "27.1" in of(diagnose(), "docker engine").found


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"])
def test_what_is_no_engine_is_none(engine: list[bytes], answer: bytes) -> None:
    engine.append(answer)
    finding = of(diagnose(), "docker engine")
    assert finding.state == MISSING and "none answers" in finding.found


def test_without_an_engine_the_other_backends_are_not_concerned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "DOCKER_SOCKET", str(tmp_path / "none"))
    report = diagnose()
    assert "docker engine" in report.unavailable_reason(DOCKER)
    assert "docker" not in report.unavailable_reason(SANDBOX) and "docker" not in report.install_command
