"""Exit codes as a shell reports them."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tangram.processes.exit_codes import KILLED, NOT_EXECUTABLE, NOT_FOUND, shell_exit_code, signal_of


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), ("kill -KILL $$", KILLED), ("/nothing/here", NOT_FOUND), ("/etc/passwd", NOT_EXECUTABLE)],
)
def test_codes_are_those_of_a_shell(command: str, code: int) -> None:
    shell = subprocess.run(["sh", "-c", f"sh -c '{command}'; exit $?"], capture_output=True, check=False)
    assert shell.returncode == code
    direct = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert shell_exit_code(direct.returncode) == code


@pytest.mark.parametrize(("code", "number"), [(KILLED, signal.SIGKILL), (0, 0), (128, 0), (255, 0), (None, 0)])
def test_only_codes_of_signals_have_one(code: int | None, number: int) -> None:
    assert signal_of(code) == number
