"""The file API of the bwrap backend.

Owns the pipes between the owner and the file workers inside the sandboxes. Promises that paths are resolved only inside
the sandbox, that no more is read than requested, and that a failure inside raises FileFailed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import msgspec

from tangram.cancellation import run_to_completion
from tangram.errors import FileFailed, ManagerError
from tangram.managers.sandboxes.bwrap.sandbox import BwrapSandbox
from tangram.managers.sandboxes.bwrap.spawner.client import ExecFailed, SpawnerClient
from tangram.managers.work import FileEntry, sandbox_path
from tangram.processes.streams import standard_input

ENTRIES_MAX = 100_000
"""Entries of one listing."""
LISTING_BYTES_MAX = 64 << 20
CHUNK_BYTES = 1 << 18
CONCURRENCY_MAX = 8
"""Concurrent file operations: each takes a process, and a thread at the other end of its pipe."""


class BwrapFiles:
    def __init__(
        self, get_sandbox: Callable[[str], BwrapSandbox], spawning: Callable[[], Awaitable[SpawnerClient]]
    ) -> None:
        self._get_sandbox = get_sandbox
        self._get_spawner = spawning
        self._semaphore = asyncio.Semaphore(CONCURRENCY_MAX)
        self._threads = ThreadPoolExecutor(CONCURRENCY_MAX, "tangram-files")

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def read(self, sandbox: str, path: str, bytes_max: int) -> bytes:
        content = bytearray()
        await self._stream_out(sandbox, "read", path, content.extend, bytes_max, bytes_max=bytes_max)
        return bytes(content)

    async def write(self, sandbox: str, path: str, content: bytes, mode: int) -> None:
        source = standard_input(content)
        beside = f".tangram-{secrets.token_hex(4)}.part"
        async with self._semaphore:
            try:
                await self._run_file_work(
                    sandbox, "write", path, [source], bytes=len(content), mode=mode, beside=beside
                )
            except BaseException as error:
                if not isinstance(error, FileFailed) or error.__cause__ is not None:
                    await run_to_completion(self._delete_partial(sandbox, path, beside))
                raise

    async def _delete_partial(self, sandbox: str, path: str, beside: str) -> None:
        """The process that wrote it was killed."""
        with contextlib.suppress(FileFailed, ManagerError):
            await self._run_file_work(sandbox, "delete", posixpath.join(posixpath.dirname(path), beside), [])

    async def delete(self, sandbox: str, path: str) -> None:
        async with self._semaphore:
            await self._run_file_work(sandbox, "delete", path, [])

    async def pack(self, sandbox: str, path: str, into: BinaryIO, bytes_max: int) -> None:
        await self._stream_out(sandbox, "pack", path, into.write, bytes_max)

    async def unpack(self, sandbox: str, path: str, tar: BinaryIO) -> None:
        """The tar is passed as a pipe, never as a descriptor of the caller's file."""

        def send(writer: int) -> None:
            with open(writer, "wb", buffering=0) as pipe, contextlib.suppress(BrokenPipeError):
                while data := tar.read(CHUNK_BYTES):
                    left = memoryview(data)
                    while left:
                        left = left[pipe.write(left) or 0 :]

        async with self._semaphore:
            self._get_sandbox(sandbox)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            sent = asyncio.get_running_loop().run_in_executor(self._threads, send, writer)
            try:
                await self._run_file_work(sandbox, "unpack", path, [reader])
            finally:
                await asyncio.shield(sent)

    async def _stream_out(
        self, sandbox: str, what: str, path: str, take: Callable[[bytes], Any], most: int, **fields: Any
    ) -> None:
        def receive(reader: int) -> int:
            """Reads to the end, or to one byte above the limit: closing the pipe then ends the writer."""
            total = 0
            with open(reader, "rb", buffering=0) as pipe:
                while total <= most and (data := pipe.read(CHUNK_BYTES)):
                    total += len(data)
                    take(data)
            return total

        async with self._semaphore:
            self._get_sandbox(sandbox)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            received = asyncio.get_running_loop().run_in_executor(self._threads, receive, reader)
            failure: FileFailed | None = None
            try:
                await self._run_file_work(sandbox, what, path, [writer], **fields)
            except FileFailed as error:
                failure = error
            finally:
                total = await asyncio.shield(received)
        if total > most:
            raise FileFailed(path, f"has more than the {most} bytes that may be read")
        if failure is not None:
            raise failure

    async def _run_file_work(self, sandbox: str, what: str, path: str, fds: list[int], **fields: Any) -> Any:
        """Closes the descriptors in any case: they belong to the sandbox by then."""
        try:
            box = self._get_sandbox(sandbox)
            target = sandbox_path(path)
            spawning = await self._get_spawner()
            # Deleting is not charged to the memory of the sandbox: a full one could never be emptied.
            groups = [] if what == "delete" else box.file_join_files
            try:
                return await spawning.file_work(box.sandbox_id, what, fds, groups, path=target, **fields)
            except ExecFailed as error:
                raise FileFailed(path, error.reason) from None
            except ManagerError as error:
                if box.is_ending():
                    raise box.gone_error() from error
                if not box.new_oom_kills():
                    raise
                limit = f"the {box.spec.memory_bytes} bytes of memory of its sandbox, which its files share"
                raise FileFailed(path, f"does not fit into {limit}") from error
        finally:
            for fd in fds:
                os.close(fd)

    async def list(self, sandbox: str, path: str) -> list[FileEntry]:
        content = bytearray()
        await self._stream_out(sandbox, "list", path, content.extend, LISTING_BYTES_MAX, entries_max=ENTRIES_MAX)
        return msgspec.json.decode(content, type=list[FileEntry])
