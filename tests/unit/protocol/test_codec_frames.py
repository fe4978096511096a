"""Frames: whatever the pieces they arrive in, the same bodies come out."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.errors import BadFrame
from capsule_tasks.protocol.codec import HEADER, FrameDecoder

CEILING = 1024


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "big") + body


def fed(decoder: FrameDecoder, pieces: Iterable[bytes]) -> list[bytes]:
    return [bytes(body) for piece in pieces for body in decoder.bodies(piece)]


def one_by_one(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def test_a_whole_frame_comes_out_at_once() -> None:
    assert fed(FrameDecoder(CEILING), [frame(b"hello")]) == [b"hello"]


def test_many_frames_in_one_feed_come_out_in_order() -> None:
    bodies = [bytes([n]) * (n + 1) for n in range(200)]
    assert fed(FrameDecoder(CEILING), [b"".join(map(frame, bodies))]) == bodies


def test_frames_fed_byte_by_byte_come_out_whole() -> None:
    decoder = FrameDecoder(CEILING)
    assert fed(decoder, one_by_one(frame(b"one") + frame(b"two"))) == [b"one", b"two"]
    assert decoder.pending_bytes == 0


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_frame_cut_anywhere_waits_for_its_rest(cut: int) -> None:
    decoder = FrameDecoder(CEILING)
    whole = frame(b"12345678")
    assert fed(decoder, [whole[:cut]]) == []
    assert decoder.pending_bytes == cut
    assert fed(decoder, [whole[cut:]]) == [b"12345678"]
    assert decoder.pending_bytes == 0


def test_a_torn_frame_behind_whole_ones_is_kept() -> None:
    decoder = FrameDecoder(CEILING)
    assert fed(decoder, [frame(b"a") + frame(b"bc")[:5]]) == [b"a"]
    assert fed(decoder, [b"c" + frame(b"d")]) == [b"bc", b"d"]


def test_feeding_nothing_changes_nothing() -> None:
    decoder = FrameDecoder(CEILING)
    assert fed(decoder, [b"", frame(b"x")[:2], b"", b"", frame(b"x")[2:], b""]) == [b"x"]


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(BadFrame, match="claims 0 bytes"):
        fed(FrameDecoder(CEILING), [frame(b"")])


def test_a_frame_as_large_as_the_ceiling_passes_and_one_byte_more_does_not() -> None:
    assert fed(FrameDecoder(CEILING), [frame(bytes(CEILING))]) == [bytes(CEILING)]
    with pytest.raises(BadFrame, match=f"claims {CEILING + 1} bytes; allowed are 1 to {CEILING}"):
        fed(FrameDecoder(CEILING), [frame(bytes(CEILING + 1))])


def test_an_oversized_claim_is_refused_before_its_body_arrives() -> None:
    with pytest.raises(BadFrame):
        fed(FrameDecoder(CEILING), one_by_one(b"\xff\xff\xff\xff"))


def test_frames_before_a_bad_one_are_delivered() -> None:
    bodies = FrameDecoder(CEILING).bodies(frame(b"good") + b"\0\0\0\0" + frame(b"never"))
    assert bytes(next(bodies)) == b"good"
    with pytest.raises(BadFrame):
        next(bodies)


def test_after_a_bad_frame_nothing_is_believed() -> None:
    decoder = FrameDecoder(CEILING)
    with pytest.raises(BadFrame):
        fed(decoder, [b"\0\0\0\0"])
    for _ in range(2):
        with pytest.raises(BadFrame, match="already"):
            fed(decoder, [frame(b"good")])


def test_a_claimed_length_allocates_nothing() -> None:
    claim = (2**31).to_bytes(HEADER, "big")
    decoder = FrameDecoder(2**31)
    tracemalloc.start()
    try:
        assert fed(decoder, [claim, b"x"]) == []
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


class CountingDecoder(FrameDecoder):
    """Counts the bytes that are copied to be kept until later."""

    kept = 0

    def _store(self, rest: memoryview) -> None:
        self.kept += len(rest)
        super()._store(rest)


def test_a_large_frame_byte_by_byte_is_not_copied_again_for_each_byte() -> None:
    """Quadratic copying would also take minutes here."""
    body = os.urandom(1024) * 2048
    decoder = CountingDecoder(len(body))
    assert fed(decoder, one_by_one(frame(body))) == [body]
    assert decoder.kept <= 2 * HEADER


def test_a_large_frame_in_chunks_behind_small_ones_is_kept_once() -> None:
    body = os.urandom(1024) * 2048
    data = frame(b"small") * 100 + frame(body) + frame(b"small") * 100
    chunks = [data[i : i + 1000] for i in range(0, len(data), 1000)]
    decoder = CountingDecoder(len(body))
    assert fed(decoder, chunks) == [b"small"] * 100 + [body] + [b"small"] * 100
    assert decoder.kept < 4 * 1000


def reference(data: bytes, ceiling: int) -> tuple[list[bytes], bool]:
    """The bodies in `data`, and whether a bad length follows them: as plainly as can be."""
    bodies = []
    while len(data) >= HEADER:
        size = int.from_bytes(data[:HEADER], "big")
        if not 0 < size <= ceiling:
            return bodies, True
        if len(data) < HEADER + size:
            break
        bodies.append(data[HEADER : HEADER + size])
        data = data[HEADER + size :]
    return bodies, False


frames = st.binary(min_size=1, max_size=40).map(frame)
"""Mostly whole frames, with junk between them now and then."""
wires = st.lists(frames | frames | st.binary(max_size=8), max_size=12).map(b"".join)


@given(wires, st.lists(st.integers(0, 400), max_size=10), st.sampled_from([1, 39, 40, 2**32 - 1]))
def test_bytes_in_any_pieces_decode_as_in_one_piece(
    data: bytes, cuts: list[int], ceiling: int
) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    decoder = FrameDecoder(ceiling)
    seen: list[bytes] = []
    bad = False
    try:
        bodies = itertools.chain.from_iterable(map(decoder.bodies, pieces))
        seen.extend(map(bytes, bodies))
    except BadFrame:
        bad = True
    assert (seen, bad) == reference(data, ceiling)
    if not bad:
        assert decoder.pending_bytes == len(data) - sum(HEADER + len(body) for body in seen)
