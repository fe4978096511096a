"""Data goes into pieces of one size, and comes out of them as it was."""

from __future__ import annotations

import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.child.checkpoints.pieces import PieceReader, PieceWriter, TooLarge

PIECE = 8


def written(*parts: bytes, max_bytes: int = 10_000) -> list[tuple[int, bytes]]:
    sent: list[tuple[int, bytes]] = []
    writer = PieceWriter(lambda offset, data: sent.append((offset, bytes(data))), PIECE, max_bytes)
    for part in parts:
        assert writer.write(part) == len(part)
    writer.flush()
    assert writer.size == sum(map(len, parts))
    return sent


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_all_pieces_but_the_last_are_full_and_follow_each_other(parts: list[bytes]) -> None:
    sent = written(*parts)
    assert b"".join(data for _, data in sent) == b"".join(parts)
    assert all(len(data) == PIECE for _, data in sent[:-1])
    assert [offset for offset, _ in sent] == list(range(0, len(sent) * PIECE, PIECE))
    assert all(0 < len(data) <= PIECE for _, data in sent[-1:])


def test_no_byte_is_sent_beyond_the_limit() -> None:
    assert len(written(b"x" * 20, max_bytes=20)) == 3
    with pytest.raises(TooLarge):
        written(b"x" * 20, b"y", max_bytes=20)


@given(st.lists(st.binary(max_size=9), max_size=6), st.lists(st.integers(0, 20), max_size=8))
def test_reads_are_those_of_the_whole(pieces: list[bytes], sizes: list[int]) -> None:
    reader, whole, at = PieceReader(list(pieces)), b"".join(pieces), 0
    assert reader.size == len(whole)
    for size in sizes:
        if size % 2:
            buffer = bytearray(size)
            assert bytes(buffer[: reader.readinto(buffer)]) == whole[at : at + size]
        else:
            assert reader.read(size) == whole[at : at + size]
        at = min(at + size, len(whole))
    for position in range(len(whole) + 1):
        reader.seek(position)
        assert reader.read(3) == whole[position : position + 3]


def test_pieces_are_freed_up_to_a_position_and_the_rest_is_still_read() -> None:
    first = bytes(bytearray(b"abc"))
    references = sys.getrefcount(first)
    reader = PieceReader([first, b"def", b"ghi"])
    reader.free(2)
    assert sys.getrefcount(first) == references + 1
    reader.free(4)
    assert sys.getrefcount(first) == references
    reader.seek(4)
    assert reader.read(9) == b"efghi"
    reader.free(9)
    assert reader.read(1) == b""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_any_format_are_read(protocol: int) -> None:
    value = [{"text": "é" * 30, "number": -5}, b"x" * 100, 1.5]
    data = pickle.dumps(value, protocol)
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    assert pickle.Unpickler(PieceReader(pieces)).load() == value
