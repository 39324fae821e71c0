"""The output of a program, bounded: beginning and end are kept, and omissions are marked."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.processes.capture import Capture


def fed(*chunks: bytes, bytes_max: int = 10) -> Capture:
    capture = Capture(bytes_max)
    for chunk in chunks:
        capture.feed(chunk)
    return capture


def test_what_fits_is_kept_as_it_is() -> None:
    assert fed(b"hello", b" ", b"you", b"!").content() == b"hello you!"


def test_of_more_the_beginning_and_the_end_are_kept_with_a_line_between() -> None:
    assert fed(b"abcdefghij" * 10).content() == b"abcde\n[... 90 bytes of 100 are not shown ...]\nfghij"


def test_a_stream_of_tiny_chunks_costs_no_more_than_the_bound() -> None:
    tracemalloc.start()
    capture = Capture(1 << 16)
    for number in range(1 << 17):
        capture.feed(b"%02x" % (number & 0xFF))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 * (1 << 16)
    assert capture.content().endswith(b"fdfeff")
    assert capture.total_bytes == 1 << 18


def test_a_stream_that_never_ends_costs_no_more_than_the_bound() -> None:
    tracemalloc.start()
    capture = Capture(1000)
    for _ in range(10_000):
        capture.feed(bytes(777))  # other ones each time
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 10_000
    assert capture.total_bytes == 7_770_000
    assert capture.missing_bytes == 7_769_000
    assert len(capture.content()) < 1100


@pytest.mark.parametrize(("bytes_max", "kept"), [(0, b""), (1, b"a")])
def test_a_bound_too_small_for_two_parts_keeps_the_beginning(bytes_max: int, kept: bytes) -> None:
    capture = fed(b"abc", bytes_max=bytes_max)
    assert capture.content().startswith(kept + b"\n[... ")
    assert capture.missing_bytes == 3 - bytes_max


def test_what_is_no_utf_8_is_shown_and_never_an_error() -> None:
    assert fed(b"a\xff\xfeb").text() == "a��b"
    assert "not shown" in fed("äöü".encode() * 20, bytes_max=7).text(), "a character may be cut in two"


@given(st.lists(st.binary(max_size=40)), st.integers(0, 60))
def test_however_it_comes_the_same_is_kept(chunks: list[bytes], bytes_max: int) -> None:
    whole = b"".join(chunks)
    assert fed(*chunks, bytes_max=bytes_max).content() == fed(whole, bytes_max=bytes_max).content()
    capture = fed(*chunks, bytes_max=bytes_max)
    assert capture.total_bytes == len(whole)
    assert capture.missing_bytes == max(0, len(whole) - bytes_max)
