"""Calls of model services, as their user sees them: a payload in, an answer out, as one action on devices.

Owns the record of what came of a call. What the bytes mean is between the caller and the engine of the service. JSON is
that of Python: NaN and infinities stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tangram.client.result import Timing, raise_for
from tangram.core.action import NO_USAGE, Status, Usage
from tangram.core.demand import GPU, Amounts, Demand, fixed, one_of
from tangram.errors import InvalidAction, ManagerError
from tangram.managers.models.devices import Cuda, DeviceSpec, Emulated
from tangram.managers.models.service import Service, all_of
from tangram.runtime.orchestrator import Settled


class Inference(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a service that has settled."""

    service: str
    status: Status
    reason: str = ""
    """Why there is no answer."""
    answer: bytes = b""
    timing: Timing = Timing(waiting_s=0.0, execution_s=0.0, overhead_s=0.0)
    """`overhead_s` is the restore, where the service was not on its devices."""
    usage: Usage = NO_USAGE
    attempts: int = 0

    @property
    def ok(self) -> bool:
        return self.status is Status.SUCCEEDED

    def check(self) -> bytes:
        """The answer, or the exception that says why there is none."""
        if not self.ok:
            raise_for(self.status, f"service {self.service}: {self.reason}", self)
        return self.answer

    def json(self) -> Any:
        """The answer, read as JSON, in which NaN and Infinity may be. Raises as `check` does."""
        answer = self.check()
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise ManagerError(f"the answer of {self.service} is no JSON: {error}", retry=False) from None


def refused(service: str, reason: str) -> Inference:
    return Inference(service=service, status=Status.REFUSED, reason=reason)


def inference_of(service: str, settled: Settled) -> Inference:
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


def demand_of(service: Service, devices: int | None, others: Mapping[str, Amounts]) -> Demand:
    """Any of the degrees that the service has, or the one that the caller wants; and of other pools what it says."""
    if devices is None:
        return Demand({GPU: one_of(*service.degrees), **others})
    if type(devices) is not int or devices not in service.degrees:
        degrees = ", ".join(map(str, service.degrees))
        raise InvalidAction("devices", devices, f"one of {degrees}, which service {service.name} runs on")
    return Demand({GPU: fixed(devices), **others})


def services_of(services: Iterable[Service]) -> list[Service]:
    return all_of("services", services, Service, "tangram.Service, such as [Service(name='judge', engine=...)]")


def devices_of(devices: Iterable[DeviceSpec]) -> list[DeviceSpec]:
    return all_of("devices", devices, Emulated | Cuda, "devices, such as [Emulated(memory_bytes=1 << 30)]")


def payload_of(payload: Any) -> bytes:
    """Bytes as they are, text as UTF-8, all else as JSON. NaN stays NaN: a null would be another value."""
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
