"""Calls of model services: a payload in, a response out, as one action on devices.

Owns the record of a call. The meaning of the bytes is agreed between the caller and the engine of the service. JSON is
that of Python: NaN and infinities are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from tangram.client.result import Timing, raise_for
from tangram.client.transport import CallableService
from tangram.core.action import NO_USAGE, Status, Usage
from tangram.core.demand import GPU, Amounts, Demand, fixed, one_of
from tangram.errors import InvalidAction, ManagerError
from tangram.runtime.orchestrator import SettledAction


class Inference(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a service that has settled."""

    service: str
    status: Status
    reason: str = ""
    """The reason of a missing response."""
    answer: bytes = b""
    timing: Timing = Timing(waiting_s=0.0, execution_s=0.0, overhead_s=0.0)
    """`overhead_s` is the restore, if the service was not on its devices."""
    usage: Usage = NO_USAGE
    attempts: int = 0

    @property
    def ok(self) -> bool:
        return self.status is Status.SUCCEEDED

    def check(self) -> bytes:
        """Returns the response, or raises the exception that explains its absence."""
        if not self.ok:
            raise_for(self.status, f"service {self.service}: {self.reason}", self)
        return self.answer

    def json(self) -> Any:
        """The response decoded as JSON, which may contain NaN and Infinity. Raises as `check` does."""
        answer = self.check()
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise ManagerError(f"the response of {self.service} is not JSON: {error}", retry=False) from None


def inference_of(service: str, settled: SettledAction) -> Inference:
    outcome = settled.outcome
    return Inference(
        service=service,
        status=outcome.status,
        reason=outcome.reason,
        answer=settled.answer if outcome.status is Status.SUCCEEDED else b"",
        timing=Timing(waiting_s=outcome.waiting_s, execution_s=outcome.execution_s, overhead_s=outcome.overhead_s),
        usage=outcome.usage,
        attempts=outcome.attempts,
    )


def demand_of(service: CallableService, devices: int | None, others: Mapping[str, Amounts]) -> Demand:
    """Any degree of the service, or the one that the caller chose, and the demand for quotas."""
    if devices is None:
        return Demand({GPU: one_of(*service.degrees), **others})
    if type(devices) is not int or devices not in service.degrees:
        degrees = ", ".join(map(str, service.degrees))
        raise InvalidAction("devices", devices, f"one of {degrees}, which service {service.name} runs on")
    return Demand({GPU: fixed(devices), **others})


def payload_of(payload: Any) -> bytes:
    """Bytes unchanged, text as UTF-8, everything else as JSON. NaN stays NaN, because null is a different value."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    try:
        if isinstance(payload, str):
            return payload.encode()
        return json.dumps(
            msgspec.to_builtins(payload, str_keys=True), ensure_ascii=False, separators=(",", ":")
        ).encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidAction("payload", type(payload).__name__, f"bytes, text or JSON ({error})") from None
