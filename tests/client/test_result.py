"""A result distinguishes errors of the program and of the infrastructure."""

from __future__ import annotations

import pytest

from tangram.client.result import Result, result_of
from tangram.core.action import Outcome, Status
from tangram.errors import ActionCancelled, ActionLost, ActionTimedOut, AdmissionRefused, CommandFailed
from tangram.managers.work import ExecResult


def result(status: Status, exit_code: int | None = None, reason: str = "", **fields: object) -> Result:
    executed = ExecResult(exit_code=exit_code, **fields)  # type: ignore[arg-type]
    return result_of(
        "make", Outcome(action="a", status=status, reason=reason, waiting_s=1.0, execution_s=2.0), executed
    )


def test_what_went_well_passes_the_check() -> None:
    succeeded = result(Status.SUCCEEDED, 0, stdout=b"ok\xff")
    assert succeeded.check() is succeeded
    assert succeeded.ok and succeeded.stdout == "ok\ufffd" and succeeded.executed.stdout == b"ok\xff"
    assert succeeded.timing.act_s == 3.0


def test_an_exit_code_is_a_result_and_fails_only_the_check() -> None:
    failed = result(Status.SUCCEEDED, 2, stderr=b"no rule to make target")
    assert not failed.ok and failed.exit_code == 2
    with pytest.raises(CommandFailed, match="'make' ended with 2: no rule to make target") as caught:
        failed.check()
    assert caught.value.result is failed


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (Status.TIMED_OUT, ActionTimedOut),
        (Status.CANCELLED, ActionCancelled),
        (Status.LOST, ActionLost),
        (Status.REFUSED, AdmissionRefused),
    ],
)
def test_every_other_end_has_an_exception_of_its_own(status: Status, error: type[Exception]) -> None:
    with pytest.raises(error, match="'make': because"):
        result(status, reason="because").check()


def test_only_what_came_to_its_end_has_an_exit_code() -> None:
    assert result(Status.TIMED_OUT, 143).exit_code is None


def test_a_command_that_ran_out_of_memory_reports_it() -> None:
    with pytest.raises(CommandFailed, match=r"ended with 137 \(out of memory\)"):
        result(Status.SUCCEEDED, 137, out_of_memory=True).check()
