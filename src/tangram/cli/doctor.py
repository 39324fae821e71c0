"""`tangram doctor`: what this machine supports, what is missing, and how to get it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tangram.cli import options, show
from tangram.errors import TangramError
from tangram.reports import terminal

if TYPE_CHECKING:
    from tangram.managers.doctor.diagnostics import Diagnostic, MachineReport

EXAMPLES = """[bold]Examples[/bold]

tangram doctor

tangram doctor --json

sudo tangram doctor  [dim]# sandboxes need root[/dim]
"""

EXIT_WITHOUT_SANDBOXES = 1
TRIAL_MEMORY = "64MiB"
TRIAL_TIMEOUT_S = 10.0
TRIAL_OUTPUT = "it works"


def doctor(as_json: options.Json = False) -> None:
    """Report what this machine supports, what is missing, and how to get it.

    Opens a real sandbox and runs a command in it; leaves no changes behind.

    Exits with 0 if sandboxes work, and with 1 if only other backends work.
    """
    from tangram.managers.doctor.diagnostics import DOCKER, PROCESS, SANDBOX, diagnose

    report = diagnose()
    why_not = {backend: report.unavailable_reason(backend) for backend in (SANDBOX, DOCKER, PROCESS)}
    trial: dict[str, float] = {}
    if not why_not[SANDBOX]:
        try:
            trial = _try_sandbox()
        except (TangramError, OSError) as error:
            why_not[SANDBOX] = f"opening a sandbox failed: {error}"
    if as_json:
        show.print_json(_as_dict(report, why_not, trial))
    else:
        _print(report, why_not, trial)
    if why_not[SANDBOX]:
        raise typer.Exit(EXIT_WITHOUT_SANDBOXES)


# ---- the trial ------------------------------------------------------------------------------------------------


def _try_sandbox() -> dict[str, float]:
    """Returns the seconds of each step. Uses a separate state directory: leftovers of dead owners in the usual one
    stay."""
    from tangram.managers.doctor.diagnostics import restoring_cgroups

    with tempfile.TemporaryDirectory(prefix="tangram-doctor-") as scratch, restoring_cgroups():
        os.chmod(scratch, 0o711)  # like a state directory: unprivileged users may traverse it
        return asyncio.run(_open_and_run(Path(scratch) / "state"))


async def _open_and_run(state: Path) -> dict[str, float]:
    from tangram.client.client import connect

    at = [time.perf_counter()]
    async with connect(state=state) as client:
        at.append(time.perf_counter())
        async with client.sandbox(memory=TRIAL_MEMORY) as sandbox:
            at.append(time.perf_counter())
            result = (await sandbox.exec(["echo", TRIAL_OUTPUT], timeout_s=TRIAL_TIMEOUT_S)).check()
            at.append(time.perf_counter())
    at.append(time.perf_counter())
    if result.stdout.strip() != TRIAL_OUTPUT:
        raise OSError(f"expected the command to print {TRIAL_OUTPUT!r}, it printed {result.stdout!r}")
    steps = zip(("start_s", "open_s", "exec_s", "close_s"), at, at[1:], strict=False)
    return {name: after - before for name, before, after in steps}


# ---- printing -------------------------------------------------------------------------------------------------


def _print(report: MachineReport, why_not: dict[str, str], trial: dict[str, float]) -> None:
    from rich.text import Text

    console = terminal.stdout_console()
    table = terminal.table("this machine")
    for head in ("component", "", "found", "what to do"):
        table.add_column(head, overflow="fold")
    for each in report.findings:
        table.add_row(each.component, _mark(each), Text(each.found), Text(each.to_do))
    console.print(table)
    lines = [f"to install what is missing: {report.install_command}"] if report.install_command else []
    usable = ", ".join(backend for backend, reason in why_not.items() if not reason)
    lines.append(f"backends that work: {usable}; process isolates nothing")
    lines += [f"{backend} does not work: {reason}" for backend, reason in why_not.items() if reason]
    if trial:
        open_ms, exec_ms = 1000 * trial["open_s"], 1000 * trial["exec_s"]
        lines.append(f"opened a sandbox in {open_ms:.0f} ms, ran a command in it in {exec_ms:.0f} ms and deleted it")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _mark(finding: Diagnostic) -> str:
    from tangram.managers.doctor.diagnostics import MISSING, OK, SANDBOX

    if finding.state == OK:
        return "[green]ok[/green]"
    colour = "red" if finding.state == MISSING and SANDBOX in finding.needed_by else "yellow"
    return f"[{colour}]{finding.state}[/{colour}]"


def _as_dict(report: MachineReport, why_not: dict[str, str], trial: dict[str, float]) -> dict[str, Any]:
    return {
        "components": report.findings,
        "install": report.install_command,
        "backends": {name: {"usable": not reason, "why_not": reason} for name, reason in why_not.items()},
        "trial": trial or None,
    }
