"""The messages between a manager and the process of a device, over a socket pair.

Framed by `processes.framing`. Both ends are this program, so messages are trusted; payloads and answers of engines are
opaque bytes.
"""

from __future__ import annotations

import msgspec

from tangram.managers.models.devices import DeviceSpec
from tangram.managers.models.host_copy import HostCopyLayout

FRAME_BYTES_MAX = 1 << 62
"""Frames carry payloads and answers, which are limited one by one (PAYLOAD_BYTES_MAX)."""

DeviceChunk = tuple[int, ...]
"""Devices by their index."""


class PreparedService(msgspec.Struct, frozen=True, kw_only=True):
    """A service whose weights are in host memory."""

    service: str
    engine: bytes
    copy_fd: int
    layout: HostCopyLayout


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    id: int
    """0 if there is no reply."""


class DeviceHello(DeviceRequest, frozen=True, kw_only=True, tag="Hello"):
    """The first request. The reply is sent when the process is ready."""

    process: int
    """The index of the device that the process serves."""
    devices: list[DeviceSpec]
    counts_fd: int
    services: list[PreparedService]


class PrepareService(DeviceRequest, frozen=True, kw_only=True, tag="Prepare"):
    engine: bytes
    copy_fd: int
    degrees: tuple[int, ...]


class LoadService(DeviceRequest, frozen=True, kw_only=True, tag="Load"):
    service: str
    devices: DeviceChunk


class UnloadService(DeviceRequest, frozen=True, kw_only=True, tag="Unload"):
    """May be sent while a call to another service runs."""

    service: str
    devices: DeviceChunk


class CallService(DeviceRequest, frozen=True, kw_only=True, tag="Call"):
    service: str
    devices: DeviceChunk
    payloads: list[bytes]


class InterruptCall(DeviceRequest, frozen=True, kw_only=True, tag="Interrupt"):
    """Interrupts the call, if possible."""

    call: int


class DeviceReply(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    id: int


class CallStarted(DeviceReply, frozen=True, kw_only=True, tag="Begun"):
    """Sent when the engine starts a call: from now on the call may have effects."""


class RequestDone(DeviceReply, frozen=True, kw_only=True, tag="Done"):
    answers: list[bytes] = []
    layout: HostCopyLayout | None = None
    needs: dict[int, int] = {}
    """Prepare: bytes on each device, by degree."""
    batch_max: int = 1
    external_weights: bool = False
    """Prepare: the weights are not in the host copy, so the service must declare its memory."""
    seconds: float = 0.0
    """Time that the engine took, without the transport."""


class RequestFailed(DeviceReply, frozen=True, kw_only=True, tag="Failed"):
    reason: str
    whose: str = "service"
    """The cause: `service`; `payload`, of the caller; `config`, of the service; `full`, a device without enough memory;
    `stopped`: the call was interrupted."""
    field: str = ""
    expected: str = ""
    """The valid values of the field of a payload or a config."""
    unclean: bool = False
    """The devices hold memory that only the end of the process frees."""


AnyDeviceRequest = DeviceHello | PrepareService | LoadService | UnloadService | CallService | InterruptCall
AnyFinalReply = RequestDone | RequestFailed
AnyDeviceReply = CallStarted | RequestDone | RequestFailed
