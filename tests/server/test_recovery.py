"""What a service says of what the one before it left, in one process: the journal as that one would have left it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.server.shared import config_of, keeping, note_box, note_exec, serving

from tangram.errors import ManagerError
from tangram.runtime.error_records import NotFound
from tangram.runtime.wire import Caps
from tangram.server.actions import service
from tangram.server.journal.journal import Journal
from tangram.server.recovery import RecoveryReport
from tangram.server.tenants import Principal, Revocation


def test_what_runs_again_is_counted_when_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping(monkeypatch, "code/kept")

    async def main() -> RecoveryReport:
        async with Journal(config_of(tmp_path).service.journal) as journal:
            for name in ("code/kept", "code/gone"):
                await note_box(journal, name)
            for box in ("kept", "gone"):
                await note_exec(journal, f"code/queued-{box}", sandbox=box)
                await note_exec(journal, f"code/again-{box}", sandbox=box, started=True, idempotent=True)
                await note_exec(journal, f"code/once-{box}", sandbox=box, started=True)
        async with serving(tmp_path) as up:
            return up.recovery_report

    report = asyncio.run(main())
    assert report == RecoveryReport(queued=1, rerun=1, lost=2, refused=2, sandboxes=1, sandboxes_lost=1)
    assert "1 queued again, 1 run again, 2 lost while running, 2 not resumed" in str(report)


def test_instances_of_functions_that_were_left_are_ended_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = keeping(monkeypatch, "function-0123456789abcdef", "code/unknown")

    async def main() -> None:
        async with serving(tmp_path):
            assert sorted(closed) == ["code/unknown", "function-0123456789abcdef"]

    asyncio.run(main())
    assert "sandbox ended sandbox=code/unknown" in caplog.text
    assert "function-" not in caplog.text


def test_recovery_keeps_the_reasons_of_a_bounded_number_of_lost_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LOST_SANDBOXES_MAX", 2)
    caller = Principal("code", "code", False, Caps(), Revocation())

    async def main() -> None:
        async with Journal(config_of(tmp_path).service.journal) as journal:
            for name in ("first", "second", "third"):
                await note_box(journal, f"code/{name}")
        async with serving(tmp_path) as server:
            with pytest.raises(NotFound):
                server.action_service.require_sandbox(caller, "first")
            for name in ("second", "third"):
                with pytest.raises(ManagerError, match="is gone: it did not outlive the service"):
                    server.action_service.require_sandbox(caller, name)

    asyncio.run(main())
