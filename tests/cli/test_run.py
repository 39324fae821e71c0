"""`tangram run`, as its users call it: what it shows, how it exits, and what it leaves, which is nothing."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.owner_cgroups import owner_names

COMMAND = str(Path(sys.executable).with_name("tangram"))
CAN = all(map(shutil.which, ("bwrap", "catatonit", "setpriv"))) and os.geteuid() == 0
needs_sandboxes = pytest.mark.skipif(
    not CAN and os.environ.get("CI") != "true", reason="needs root, bubblewrap and catatonit: `tangram doctor`"
)


@pytest.fixture(scope="module")
def shared_state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tangram-test-") as folder:
        os.chmod(folder, 0o711)  # an unprivileged user passes through to the files of its sandbox
        yield Path(folder) / "state"


@pytest.fixture(autouse=True)
def state(shared_state: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANGRAM_STATE", str(shared_state))
    return shared_state


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.01)


# ---- the command --------------------------------------------------------------------------------------------------


@needs_sandboxes
def test_several_words_are_executed_without_a_shell(cli) -> None:
    done = cli("run", "--", "echo", "$HOME", "a  b", "--json")
    assert (done.code, done.out, done.err) == (0, "$HOME a  b --json\n", "")


@needs_sandboxes
def test_one_word_with_blanks_goes_through_a_shell(cli) -> None:
    done = cli("run", "echo out; echo err >&2; pwd; whoami")
    assert (done.code, done.out, done.err) == (0, "out\n/work\nagent\n", "err\n")


@needs_sandboxes
def test_what_follows_the_command_belongs_to_it_without_dashes_too(cli) -> None:
    assert cli("run", "--key", "k", "echo", "--cpus", "--", "-x").out == "--cpus -- -x\n"


@needs_sandboxes
@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 137)])
def test_it_exits_as_the_command_does(cli, script: str, code: int) -> None:
    assert cli("run", script).code == code


@needs_sandboxes
def test_a_missing_program_exits_with_127_and_the_reason(cli) -> None:
    done = cli("run", "--", "no-such-program")
    assert done.code == 127
    assert "no-such-program: No such file or directory" in done.err


@needs_sandboxes
def test_variables_directory_cores_and_user_are_as_given(cli) -> None:
    words = ("--env", "A=1=2", "--env", "B=", "--cwd", "/tmp", "--cpus", "1-1", "--user", "root")
    done = cli("run", *words, "echo $A-$B-; pwd; echo {cpus} $(nproc); id -u")
    assert (done.code, done.out) == (0, "1=2--\n/tmp\n1 1\n0\n")


@needs_sandboxes
def test_standard_input_is_passed_on_if_the_option_is_set() -> None:
    for option, expected in (["--stdin"], "SAID\n"), ([], ""):
        words = [COMMAND, "run", *option, "--", "tr", "a-z", "A-Z"]
        done = subprocess.run(words, input="said\n", capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@needs_sandboxes
def test_files_go_in_before_and_come_out_after(cli, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "numbers").write_text("3\n1\n2\n")
    words = (
        "--upload",
        tmp_path / "in",
        "--download",
        f"out:{tmp_path}",
        "--download",
        f"/etc/hostname:{tmp_path}/etc",
    )
    done = cli("run", *words, "mkdir out; sort in/numbers > out/sorted; exit 4")
    assert (done.code, done.err) == (4, "")
    assert (tmp_path / "out" / "sorted").read_text() == "1\n2\n3\n"
    assert (tmp_path / "etc" / "hostname").exists()


@needs_sandboxes
def test_what_cannot_be_downloaded_is_our_failure_unless_the_command_failed_before(cli, tmp_path: Path) -> None:
    done = cli("run", "--download", f"none:{tmp_path}", "--", "true")
    assert done.code == 125 and "not downloaded" in done.err
    assert cli("run", "--download", f"none:{tmp_path}", "--", "false").code == 1


@needs_sandboxes
def test_a_directory_can_be_the_image(cli, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tangram-test-") as folder:
        root = Path(folder)
        os.chmod(root, 0o755)
        shell = os.path.realpath("/bin/sh")
        listed = subprocess.run(["ldd", shell], capture_output=True, text=True, check=True).stdout
        for path in [shell, *re.findall(r"(/\S+) \(0x", listed)]:
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path[1:])
        (root / "bin").mkdir(exist_ok=True)
        if not (root / "bin/sh").exists():
            (root / "bin/sh").symlink_to(shell)
        (root / "marker").touch()
        done = cli("run", "--image", root, "test -e /marker && echo found; test -e /usr/bin/env || echo alone")
    assert (done.code, done.out) == (0, "found\nalone\n")


# ---- what is not the command's ------------------------------------------------------------------------------------


@needs_sandboxes
def test_a_command_that_times_out_exits_with_124(cli) -> None:
    done = cli("run", "--timeout", "1", "--", "sleep", "1000")
    assert done.code == 124
    assert done.err.startswith("tangram: timed out: ")


@needs_sandboxes
@pytest.mark.parametrize("words", [("--memory", "900TiB"), ("--cpus", "100000")])
def test_what_no_machine_has_is_refused_with_125(cli, words: tuple[str, ...]) -> None:
    done = cli("run", *words, "--", "true")
    assert done.code == 125
    assert done.err.startswith("tangram: refused: ")
    result = cli("run", *words, "--json", "--", "true")
    assert result.code == 125
    assert (result.json["status"], result.json["exit_code"]) == ("refused", None)
    assert result.json["reason"]


@needs_sandboxes
def test_exhausted_memory_is_reported(cli) -> None:
    script = "x=0123456789abcdef; while :; do x=$x$x; done"
    done = cli("run", "--memory", "32MiB", script)
    assert done.code == 137
    assert "used up its memory of 32MiB" in done.err
    result = cli("run", "--memory", "32MiB", "--json", script)
    assert result.json["out_of_memory"] and result.err == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cpus", "many"), "cpus: expected a number of cores"),
        (("--cpus", "1.2.3"), "cpus: expected a number of cores"),
        (("--cpus", "0", "--backend", "process"), "cpus: expected a number of cores above 0"),
        (("--cpus", "3-1", "--backend", "process"), "cpus: expected a number of cores above 0"),
        (("--memory", "1MiB", "--backend", "process"), "at least 4 MiB, got '1MiB'"),
        (("--env", "A"), "env: expected KEY=VALUE"),
        (("--env", "=1"), "env: expected KEY=VALUE"),
        (("--upload", "/no/such/file"), "upload: expected a file or directory that exists"),
        (("--image", "/no/such.tar"), "image: expected a root directory or tar that exists"),
        (("--image", "./nosuch"), "no such file or directory"),
        (("--image", "nosuch.tar.gz"), "no such file or directory"),
        (("--download", "x"), "download: expected PATH:DIR"),
        (("--backend", "pod"), "backend: expected one of sandbox, process, docker"),
        (("--backend", "process", "--timeout", "0"), "timeout_s: expected a positive"),
        (("--backend", "process", "--memory", "much"), "memory: expected a size"),
        (("--backend", "process", "--user", "bob"), "sandbox.user: expected 'agent' or 'root'"),
    ],
)
def test_what_is_wrong_with_the_input_is_one_line_and_exit_code_2(cli, words: tuple[str, ...], says: str) -> None:
    done = cli("run", *words, "--", "true")
    assert (done.code, done.out) == (2, "")
    assert says in done.err and done.err.count("\n") == 1


@needs_sandboxes
def test_an_image_that_does_not_exist_is_wrong_input(cli) -> None:
    done = cli("run", "--image", "no-such-image", "--", "true")
    assert done.code == 2 and "'host'" in done.err


# ---- without sandboxes --------------------------------------------------------------------------------------------

# It is called once as root, so that all is imported: the files of Python may be out of reach for others.
AS_OTHER_USER = """
import os, sys
from typer.testing import CliRunner
import tangram.cli
assert CliRunner().invoke(tangram.cli.app, ["run", "--backend", "none", "true"]).exit_code == 2
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
sys.argv = ["tangram", "run", "--", "id"]
tangram.cli.main()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="has to switch to another user")
def test_without_root_the_error_names_the_alternatives() -> None:
    done = subprocess.run([sys.executable, "-c", AS_OTHER_USER], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (125, "")
    assert "sandboxes need root" in done.stderr
    assert "--backend process, which isolates nothing" in done.stderr


def test_the_backend_process_needs_no_sandboxes(cli) -> None:
    done = cli("run", "--backend", "process", "--json", "echo here; exit 6")
    assert done.code == 6
    assert (done.json["backend"], done.json["stdout"], done.json["exit_code"]) == ("process", "here\n", 6)


# ---- output -------------------------------------------------------------------------------------------------------


@needs_sandboxes
def test_json_has_all_fields(cli) -> None:
    done = cli("run", "--json", "echo out; echo err >&2; exit 5")
    document = done.json
    assert (done.code, done.err) == (5, "")
    assert (document["status"], document["exit_code"], document["reason"]) == ("succeeded", 5, "")
    assert (document["stdout"], document["stderr"], document["stdout_bytes"]) == ("out\n", "err\n", 4)
    assert document["out_of_memory"] is False
    assert set(document["timing"]) == {"waiting_s", "execution_s", "overhead_s", "act_s"}
    assert document["usage"]["cpu_s"] > 0.0 and document["usage"]["memory_peak_bytes"] > 0
    assert (document["label"], document["attempts"]) == ("measured", 1)


@needs_sandboxes
@pytest.mark.parametrize("option", ["--summary", "--verbose"])
def test_a_summary_is_one_line_on_stderr(cli, option: str) -> None:
    done = cli("run", option, "--", "echo", "hi")
    assert done.out == "hi\n"
    words = r"tangram: succeeded with 0, waited [\d.]+ s, ran [\d.]+ s, cpu [\d.]+ s, peak memory [\d.]+ MiB\n"
    assert re.fullmatch(words, done.err)


@needs_sandboxes
def test_a_terminal_sees_the_summary_unasked() -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run([COMMAND, "run", "--", "true"], stdout=subprocess.DEVNULL, stderr=theirs, timeout=120)
        assert done.returncode == 0
        assert b"tangram: succeeded with 0" in os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)


# ---- ends ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(state: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command; afterwards nothing of it may be left."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [COMMAND, "run", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        _, stderr = process.communicate()
        assert [name for name in owner_names() if name.startswith(f"{process.pid}-")] == [], stderr
    assert not (state / "owners").exists() or os.listdir(state / "owners") == []


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def running(mark: str) -> list[str]:
    results = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            results.append(path.parent.name)
    return results


@needs_sandboxes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_output_comes_live_and_a_signal_ends_the_command(start, number: int, code: int) -> None:
    seconds = str(100_000_000 + os.getpid())
    process = start("--", "sh", "-c", f"echo first; sleep {seconds}")
    assert first_line(process) == "first\n", "it is shown while the command runs"
    wait_until(lambda: running(seconds))
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "", "")
    assert running(seconds) == []


@needs_sandboxes
def test_the_command_may_print_before_it_ends(start) -> None:
    process = start("trap 'echo ending; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    assert first_line(process) == "ready\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "ending\n")


@needs_sandboxes
def test_a_command_that_will_not_end_is_killed_however_often_ctrl_c_comes(start) -> None:
    process = start("trap '' TERM INT; echo ready; while :; do sleep 0.05; done")
    assert first_line(process) == "ready\n"
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # a pause between key strokes; the end does not depend on it
    assert (process.returncode, process.communicate(timeout=60)) == (130, ("", ""))


@needs_sandboxes
def test_ctrl_c_at_any_moment_leaves_nothing(start) -> None:
    """From before Python has come up to after the sandbox is gone; the fixture looks for what is left."""
    began = time.monotonic()
    start("--", "true").wait(60)
    whole_s = time.monotonic() - began
    for part in (0.0, 0.4, 0.6, 0.8, 0.95):
        process = start("--", "true")
        time.sleep(part * whole_s)  # which moment it hits does not matter
        process.send_signal(signal.SIGINT)
        process.wait(60)


@needs_sandboxes
def test_a_reader_that_stops_early_ends_the_command(start) -> None:
    process = start("--", "yes")
    assert first_line(process) == "y\n"
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as stderr:
        assert stderr.read() == ""
    assert process.wait(60) == 1
    process.stdout = process.stderr = None


@needs_sandboxes
def test_a_command_that_ends_leaves_nothing(start) -> None:
    process = start("--json", "--", "sh", "-c", "sleep 1000 & echo done")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["stdout"] == "done\n"


@needs_sandboxes
def test_the_example_with_the_number_of_cores_works(cli, tmp_path: Path) -> None:
    """The directory of make, which is present on a build machine."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "Makefile").write_text("all:\n\t@echo $(MAKEFLAGS)\n")
    words = ("--cpus", "1-1", "--timeout", "60", "--upload", tmp_path / "project")
    done = cli("run", *words, "--", "make", "-C", "project", "--no-print-directory", "-j{cpus}")
    assert (done.code, done.err) == (0, "") and "-j1" in done.out


def test_the_help_has_examples(cli) -> None:
    done = cli("run", "--help")
    assert done.code == 0 and "tangram run" in done.out and "124" in done.out
