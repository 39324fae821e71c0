"""Output of a command between its marks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tangram.managers.sandboxes.docker.output_framing import FrameParser


def fed(token: str, chunks: list[bytes]) -> tuple[bytes, FrameParser]:
    marked = FrameParser(token)
    return b"".join([*(marked.feed(chunk) for chunk in chunks), marked.flush()]), marked


@given(
    st.binary(max_size=40),
    st.lists(
        st.sampled_from([b"text", b"\0", b"\0end ", b"\0end t ", b"\0end t 1", b"\0end t 1 2 x\n", b"\n"]), max_size=8
    ),
    st.lists(st.integers(0, 200), max_size=10),
)
def test_however_a_stream_is_cut_the_same_stands_between_its_marks(
    before: bytes, output: list[bytes], cuts: list[int]
) -> None:
    inner = b"".join(output)
    whole = before + b"\0begin t 5 0\n" + inner + b"\0end t 7 12 99\n" + b"after"
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    got, marked = fed("t", [whole[at:to] for at, to in itertools.pairwise(places)])
    assert got == inner
    assert (marked.exit_code, marked.cpu_us, marked.peak_bytes, marked.shell_ended) == (7, 7, 99, False)


def test_a_stream_without_an_end_is_passed_on_to_its_last_byte() -> None:
    got, marked = fed("t", [b"\0begin t 0 0\nabc\0end t 1"])
    assert (got, marked.exit_code) == (b"abc\0end t 1", None)
    got, marked = fed("t", [b"cannot start"])
    assert (got, marked.preamble) == (b"", b"cannot start")
