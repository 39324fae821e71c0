"""The installed command, in processes of its own: exit codes, streams, terminals and Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tangram.cli import app
from tangram.errors import InvariantError
from tangram.sim import trace_summary

COMMAND = str(Path(sys.executable).with_name("tangram"))


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, timeout=120)


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command and each group of commands."""
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*words, name))


@pytest.mark.parametrize(
    "words", list(commands(typer.main.get_command(app))), ids=lambda words: " ".join(words) or "all"
)
def test_the_help_of_every_command_has_examples(cli, words: tuple[str, ...]) -> None:
    done = cli(*words, "--help")
    assert done.code == 0
    assert re.search(rf"Examples?\b.*tangram {' '.join(words)}", done.out, re.DOTALL), done.out


def test_help_is_shown_as_a_flag_which_takes_no_value(cli) -> None:
    for words in ([], ["status"], ["trace"], ["trace", "show"]):
        assert re.search(r"--help +Show this message and exit", cli(*words, "--help").out), words


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['tangram', '--help']\n"
        "from tangram.cli import main\n"
        "try: main()\n"
        "except SystemExit: print('HEAVY', [m for m in ('numpy', 'tangram.sim.engine') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "HEAVY []" in done.stdout


def test_version_is_printed(cli) -> None:
    assert re.fullmatch(r"tangram \d+\.\d+\.\d+\n", cli("--version").out)


def test_json_alone_reaches_stdout_and_nothing_stderr() -> None:
    done = run("sim", "--batch", 3, "--seeds", 2, "--policies", "fcfs,adaptive", "--json", "--workers", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["label"] == "simulated"


def test_an_error_in_the_input_exits_with_2_and_one_line() -> None:
    done = run("sim", "--cores", 0)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"tangram: cores: expected .*, got '0'\n", done.stderr)


def test_a_bug_of_ours_is_called_one_and_brings_its_story(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise InvariantError("pool cpu is oversold", ["1.0 s Submit", "2.0 s Start"])

    monkeypatch.setattr(trace_summary, "summarize", broken)
    done = cli("trace", "show", "x.jsonl")
    assert done.code == 2
    assert "this is a bug in Tangram" in done.err and "2.0 s Start" in done.err


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------


def alive(group: int) -> list[str]:
    """Processes of a process group that still run; zombies have ended."""
    pids = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            pids.append(status.parent.name)
    return pids


def wait_until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(("verb", "workers"), [("sim", 1), ("sim", 2), ("plan", 2)])
def test_ctrl_c_ends_all_processes_and_exits_with_130(verb: str, workers: int, tmp_path: Path) -> None:
    more = ["--report", str(tmp_path / "report.html")]
    more += ["--policies", "adaptive", "--record", str(tmp_path / "run.jsonl")] if verb == "sim" else []
    process = subprocess.Popen(
        [COMMAND, verb, "coding", "--batch", "3000", "--seeds", "4", "--workers", str(workers), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        # The command, two workers, and the tracker that Python starts beside them; alone, it records by itself.
        wait_until(lambda: len(alive(process.pid)) >= 4 if workers > 1 else any(tmp_path.iterdir()))
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err) == (130, "", "")
        wait_until(lambda: alive(process.pid) == [])
        assert list(tmp_path.iterdir()) == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


STUBBORN = """
import asyncio, pathlib
from tangram.rl.environments import calls
from tangram.rl.environments.chain import Chain

calls.ENDING_S_MAX = 0.2

class Stubborn(Chain):
    async def step(self, action):
        pathlib.Path("stepped").touch()
        while True:
            try:
                await asyncio.sleep(3600.0)
            except asyncio.CancelledError:
                pass
"""
SLOW = """
import pathlib, time

def slow(transcript):
    pathlib.Path({place!r}).touch()
    time.sleep(3600.0)
"""
PLAYED = """
[groups]
size = 1
[[tasks]]
name = "chain"
environment = "{environment}"
"""
SIGNALS = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


def signalled(folder: Path, number: int, *words: str) -> tuple[int, str, str]:
    """Exit code and both streams of the command, that is sent a signal once there is a file `stepped`."""
    process = subprocess.Popen(
        [COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        # As a shell starts what follows `&` in a script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        wait_until(lambda: (folder / "stepped").exists() or process.poll() is not None)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@SIGNALS
def test_a_signal_ends_a_check_of_an_environment_that_does_not_listen(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    ended, out, err = signalled(tmp_path, number, "rl", "check", "stubborn:Stubborn")
    assert (ended, out, err) == (code, "", "")


@SIGNALS
def test_a_signal_ends_a_rollout_which_reports_the_played_episodes(number: int, code: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    (tmp_path / "play.toml").write_text(PLAYED.format(environment="stubborn:Stubborn"))
    words = ("rl", "rollout", "play.toml", "--groups", "1", "--quiet", "--out", "log.jsonl")
    ended, out, err = signalled(tmp_path, number, *words)
    assert (ended, out) == (code, "")
    message = (
        "interrupted: 1 trajectory ended (1 cancelled); the trajectories are in log.jsonl: tangram rl show log.jsonl"
    )
    assert message in err and "Traceback" not in err and "Task was destroyed" not in err
    assert run("rl", "show", tmp_path / "log.jsonl").returncode == 0


def test_sigterm_ends_a_rollout_during_a_reward(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "rewards.py").write_text(SLOW.format(place=str(tmp_path / "stepped")))
    reward = '[tasks.reward]\nkind = "function"\nfunction = "rewards:slow"\n[resources]\nbackend = "process"\n'
    (tmp_path / "play.toml").write_text(PLAYED.format(environment="chain") + reward)
    ended, out, err = signalled(tmp_path, signal.SIGTERM, "rl", "rollout", "play.toml", "--groups", "1", "--quiet")
    assert (ended, out) == (143, "")
    assert err == "interrupted: 1 trajectory ended (1 cancelled); without --out FILE they are not saved\n"


# ---- streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["sim"], ["sim", "--json"], ["bench"]])
def test_a_reader_that_stops_early_sees_no_traceback(words: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    more = ["--batch", "3", "--seeds", "1", "--workers", "1", "--report", str(report)] if words[0] == "sim" else []
    process = subprocess.Popen([COMMAND, *words, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as stderr:
        assert stderr.read() == ""
    process.wait(timeout=60)
    assert report.exists() == (words[0] == "sim"), "the report is written before the table"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
def test_output_that_cannot_be_written_is_one_line_and_exit_code_2() -> None:
    with Path("/dev/full").open("w") as full:
        words = [COMMAND, "sim", "--batch", "3", "--seeds", "1", "--workers", "1"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("tangram: ") and done.stderr.count("\n") == 1


def test_warnings_go_to_stderr_beside_json() -> None:
    words = ("--batch", 4, "--cores", 4, "--seeds", 1, "--faults", 8, "--policies", "fcfs", "--workers", 1)
    done = run("sim", *words, "--json")
    assert done.returncode == 0 and done.stderr.startswith("warning: ")
    assert json.loads(done.stdout)["comparisons"][0]["policies"]["fcfs"]["mean"]["failed"] > 0


# ---- terminals ------------------------------------------------------------------------------------------------


def test_a_terminal_sees_a_progress_bar_and_then_the_table() -> None:
    ours, theirs = pty.openpty()
    words = ["sim", "--batch", "40", "--seeds", "2", "--policies", "fcfs,adaptive", "--workers", "1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([COMMAND, *words], stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    output = bytearray()
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        output += part
    os.close(ours)
    assert process.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())
    assert "simulating coding" in text and "of 4 simulations" in text
    assert "times less than fcfs" in text
