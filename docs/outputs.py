"""The outputs in the documentation: `python docs/outputs.py [PAGE ...]` runs their commands and replaces them, on all
pages or on those given.

A comment before a block marks it. Everything runs in one temporary directory, page by page and from top to bottom, so
later blocks can use the files of earlier ones; no command runs twice. Some blocks open real sandboxes, which need root;
their state is in that directory too.

    <!-- run -->              a console block: its commands run, their output is not shown
    <!-- output -->           a console block: each `$ command` is followed by its output
    <!-- output: COMMAND -->  the same, but COMMAND runs instead of the command of the block
    <!-- output -->           a text block: the output of the Python block before it
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>run|output)(?:: (?P<command>[^\n]+))? -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)

COMMAND_S_MAX = 300.0
"""Time limit of one command."""


class Shell:
    """Runs commands in one directory, each once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        scripts = Path(sys.executable).parent
        self._environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
        self._printed: dict[str, str] = {}

    def run(self, command: str) -> str:
        if command not in self._printed:
            done = subprocess.run(
                command,
                shell=True,
                cwd=self.directory,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=COMMAND_S_MAX,
            )
            if done.returncode or done.stderr:
                raise SystemExit(f"{command}\nexit code {done.returncode}\n{done.stderr}")
            lines = [line.rstrip() for line in done.stdout.splitlines()]
            self._printed[command] = "\n".join(lines).strip("\n") + "\n"
        return self._printed[command]


def renewed(page: str, shell: Shell) -> str:
    """Returns the page with the output of every marked block replaced. A page without marks is returned unchanged, and
    nothing runs."""
    if not any(block["mark"] for block in BLOCK.finditer(page)):
        return page
    program = types.ModuleType("__main__")
    printed = ""

    def replace_block(block: re.Match[str]) -> str:
        nonlocal printed
        if block["language"] == "python":
            printed = _run_python(block["text"], program, shell.directory)
        if not block["mark"]:
            return block[0]
        text = printed if block["language"] == "text" else _console(block, shell)
        start, end = block.span("text")
        return block[0][: start - block.start()] + text + block[0][end - block.start() :]

    return BLOCK.sub(replace_block, page)


def _console(block: re.Match[str], shell: Shell) -> str:
    text = ""
    for line in re.findall(r"^\$ .+\n", block["text"], re.MULTILINE):
        output = shell.run(block["command"] or line.removeprefix("$ ").strip())
        text += line + (output if block["mark"] == "output" else "")
    return text


def _run_python(text: str, program: types.ModuleType, directory: Path) -> str:
    """Runs the Python blocks of a page as one program, as its test does."""
    printed = io.StringIO()
    before, sys.modules["__main__"] = sys.modules["__main__"], program
    try:
        with contextlib.chdir(directory), contextlib.redirect_stdout(printed):
            exec(compile(text, "<documentation>", "exec", dont_inherit=True), vars(program))
    finally:
        sys.modules["__main__"] = before
    return printed.getvalue()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TANGRAM_STATE"] = f"{directory}/state"
        shell = Shell(Path(directory))
        (shell.directory / "build").mkdir()
        (shell.directory / "examples").symlink_to(ROOT / "examples")
        names = [Path(name).resolve() for name in sys.argv[1:]]
        for path in names or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
            before = path.read_text(encoding="utf-8")
            after = renewed(before, shell)
            if after != before:
                path.write_text(after, encoding="utf-8")
                print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
