"""The tail of an output: every byte once and in order, or counted as skipped, at a bounded cost."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from tests.server.http_caller import DEADLINE_S, line, local_service, open_ports, until

from tangram.processes.streams import STDERR, STDOUT
from tangram.runtime.wire import OutputChunk
from tangram.server.actions import output_buffer
from tangram.server.actions.output_buffer import SEGMENT_BYTES_MAX, OutputBuffer
from tangram.server.http import listener


async def read(output: OutputBuffer, after: int = 0) -> list[OutputChunk]:
    async with asyncio.timeout(DEADLINE_S):
        return [chunk async for chunk in output.follow(after)]


def test_output_is_returned_in_order_with_its_end() -> None:
    async def main() -> None:
        output = OutputBuffer(1 << 20)
        for stream, data in ((STDOUT, b"one "), (STDOUT, b"two"), (STDERR, b"!"), (STDOUT, b"three")):
            output(stream, data)
        output.close()
        *chunks, end = await read(output)
        assert [(chunk.offset, chunk.stream, chunk.data) for chunk in chunks] == [
            (0, "stdout", b"one two"),
            (7, "stderr", b"!"),
            (8, "stdout", b"three"),
        ]
        assert end == OutputChunk(offset=13)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_every_byte_is_returned_once_or_counted_as_skipped(seed: int) -> None:
    """Readers that are slow, that come late, and that go and come again."""

    async def main() -> None:
        chance = random.Random(seed)
        output, written = OutputBuffer(3 * SEGMENT_BYTES_MAX), bytearray()

        async def write() -> None:
            for _ in range(2000):
                data = chance.randbytes(chance.choice((1, 7, 300, 5000)))
                written.extend(data)
                output(chance.choice((STDOUT, STDERR)), data)
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
            output.close()

        async def follow() -> tuple[int, int]:
            after, position, skipped = 0, 0, 0
            while True:
                async for chunk in output.follow(after):
                    assert chunk.offset == after + chunk.skipped, "a gap that was not counted, or bytes told twice"
                    skipped += chunk.skipped
                    if not chunk.stream:
                        return position, skipped + chunk.offset - after
                    assert chunk.data == written[chunk.offset : chunk.offset + len(chunk.data)]
                    after = chunk.offset + len(chunk.data)
                    position += len(chunk.data)
                    for _ in range(chance.choice((0, 0, 1, 50))):
                        await asyncio.sleep(0)
                    if chance.random() < 0.1:
                        break  # cut off; it comes again

        async with asyncio.timeout(DEADLINE_S):
            readers = [asyncio.create_task(follow()) for _ in range(5)]
            await write()
            for returned, skipped in await asyncio.gather(*readers):
                assert returned + skipped == len(written)

    asyncio.run(main())


def test_unread_output_is_skipped_and_the_reader_gets_the_count() -> None:
    async def main() -> None:
        output = OutputBuffer(2 * SEGMENT_BYTES_MAX)
        for number in range(10):
            output(STDOUT, bytes([number]) * SEGMENT_BYTES_MAX)
        output.close()
        first, *rest = await read(output)
        assert first.skipped == first.offset > 0
        assert first.skipped + sum(len(chunk.data) for chunk in (first, *rest)) == 10 * SEGMENT_BYTES_MAX
        assert rest[-1] == OutputChunk(offset=10 * SEGMENT_BYTES_MAX)

    asyncio.run(main())


@pytest.mark.parametrize("streams", [(STDOUT,), (STDOUT, STDERR)], ids=["one stream", "both in turn"])
def test_a_program_that_writes_byte_by_byte_takes_no_more_than_its_limit(streams: tuple[int, ...]) -> None:
    async def main() -> None:
        bytes_max = 64 << 10
        output = OutputBuffer(bytes_max)
        tracemalloc.start()
        try:
            for number in range(100_000):
                output(streams[number % len(streams)], b"x")
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert output.buffered_bytes <= bytes_max
        assert held < 4 * bytes_max

    asyncio.run(main())


def test_a_waiting_reader_examines_only_new_output(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0

    class Counting(output_buffer.OutputSegment):
        @property
        def end(self) -> int:
            nonlocal looked_at
            looked_at += 1
            return super().end

    monkeypatch.setattr(output_buffer, "OutputSegment", Counting)

    async def main() -> None:
        output = OutputBuffer(1 << 20)
        for number in range(2000):
            output((STDOUT, STDERR)[number % 2], b"x")
        follower = output.follow()
        for _ in range(2000):
            await anext(follower)
        for number in range(1000):
            output((STDOUT, STDERR)[number % 2], b"y")
            assert (await anext(follower)).data == b"y"

    asyncio.run(main())
    assert looked_at < 20_000  # with all pieces each time it would be two millions


def test_a_place_beyond_the_end_is_waited_at_and_ends() -> None:
    async def main() -> None:
        output = OutputBuffer(1 << 20)
        output(STDOUT, b"abc")
        output.close()
        assert await read(output, after=1 << 53) == [OutputChunk(offset=3)]

    asyncio.run(main())


def test_output_is_followed_over_http_while_it_comes_and_after_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_service(tmp_path, backend="process") as caller:
            await caller.open()
            await caller.run("it", "echo one; sleep 1000", wait_s=0, follow=True)
            url = f"{caller.address}/v1/actions/it/output"
            async with caller.session.get(url) as response:
                assert response.headers["content-type"] == "application/x-ndjson"
                first = msgspec.json.decode(await response.content.readline(), type=OutputChunk)
                assert (first.stream, first.data) == ("stdout", b"one\n")
                await caller.request("POST", "/v1/actions/it/cancel")
                last = [msgspec.json.decode(said, type=OutputChunk) async for said in response.content][-1]
                assert last == OutputChunk(offset=4)
            output = await caller.request("GET", "/v1/actions/it/output", after=2)
            lines = [msgspec.json.decode(said, type=OutputChunk) for said in output.content.splitlines()]
            assert lines[0].data == b"e\n" and lines[-1].stream == ""

    asyncio.run(main())


def test_a_follower_that_does_not_read_blocks_nothing_and_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SEND_TIMEOUT_S", 0.5)

    ports = open_ports(monkeypatch)

    async def main() -> None:
        async with local_service(tmp_path, backend="process") as caller, line(caller.address) as idle:
            await caller.open()
            await caller.run("it", "until [ -e go ]; do sleep 0.01; done; yes | head -c 64M", wait_s=0, follow=True)
            await idle.send(b"GET /v1/actions/it/output HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            idle.stop_reading()
            assert idle.port in ports
            await caller.run("go", "touch go")
            response = await caller.request("GET", "/v1/actions/it", wait_s=30)
            assert response.json["settled"]["executed"]["stdout_bytes"] == 64 << 20
            await until(lambda: idle.port not in ports)

    asyncio.run(main())
