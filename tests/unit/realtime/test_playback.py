"""How much of the audio was played, with and without somebody who tells it."""

from __future__ import annotations

import pytest

from capsule_tasks.realtime.model import AudioInterrupted
from capsule_tasks.realtime.playback import (
    PlaybackTracker,
    UnplayedAudio,
    bytes_per_ms,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, ms: float) -> None:
        self.now_s += ms / 1000


def ms(count: int) -> int:
    """The bytes of so many milliseconds."""
    return 48 * count


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def audio(clock: Clock) -> UnplayedAudio:
    return UnplayedAudio(clock=clock)


@pytest.mark.parametrize(
    ("audio_format", "expected"),
    [
        (None, 48),
        ("pcm16", 48),
        ("audio/pcm", 48),
        ({"type": "audio/pcm"}, 48),
        ({"type": "audio/pcm", "rate": 24000}, 48),
        ({"type": "audio/pcm", "rate": 16000}, 32),
        ({"type": "audio/pcm", "rate": None}, 48),
        ({"type": "audio/pcm", "rate": float("nan")}, 48),
        ({"type": None}, 48),
        ("an unknown one", 48),
        *((name, 8) for name in ("g711_ulaw", "g711_alaw", "pcmu", "pcma")),
        *(({"type": name}, 8) for name in ("audio/pcmu", "audio/pcma", "g711_ulaw")),
    ],
)
def test_formats(audio_format: object, expected: float) -> None:
    assert bytes_per_ms(audio_format) == expected  # type: ignore[arg-type]


# --- the tracker of users ------------------------------------------------------------------------


def test_a_tracker_adds_up_what_was_played_of_an_item() -> None:
    tracker = PlaybackTracker()
    assert tracker.state() is None
    tracker.on_play_bytes("item_1", 0, bytes(4800))
    tracker.on_play_ms("item_1", 0, 50)
    assert tracker.state() == ("item_1", 0, 150.0)
    tracker.on_play_ms("item_1", 1, 10)
    assert tracker.state() == ("item_1", 1, 10.0)
    tracker.on_interrupted()
    assert tracker.state() is None


def test_a_tracker_counts_bytes_in_the_format_of_the_session() -> None:
    tracker = PlaybackTracker()
    tracker.set_audio_format({"type": "audio/pcmu"})
    tracker.on_play_bytes("item_1", 0, bytes(800))
    assert tracker.state() == ("item_1", 0, 100.0)


# --- without a tracker ---------------------------------------------------------------------------


def test_audio_is_played_at_its_own_speed_from_its_first_piece(
    audio: UnplayedAudio, clock: Clock
) -> None:
    for _ in range(4):
        assert audio.add("resp_1", "item_1", 0, ms(250))
    clock.sleep(400)
    assert audio.stop(None, "resp_1") == [AudioInterrupted("item_1", 0, 400, 1000)]


def test_no_more_is_played_than_has_come(audio: UnplayedAudio, clock: Clock) -> None:
    audio.add("resp_1", "item_1", 0, ms(100))
    clock.sleep(5000)
    assert audio.stop(None, "resp_1") == [AudioInterrupted("item_1", 0, 100, 100)]


def test_a_player_that_had_nothing_to_play_goes_on_with_the_next_piece(
    audio: UnplayedAudio, clock: Clock
) -> None:
    audio.add("resp_1", "item_1", 0, ms(100))
    clock.sleep(1000)
    audio.add("resp_1", "item_1", 0, ms(100))
    clock.sleep(30)
    assert audio.stop(None, None) == [AudioInterrupted("item_1", 0, 130, 200)]


def test_an_item_is_played_after_the_one_before_it(audio: UnplayedAudio, clock: Clock) -> None:
    audio.add("resp_1", "item_1", 0, ms(300))
    audio.add("resp_1", "item_2", 0, ms(300))
    audio.add("resp_1", "item_2", 1, ms(300))
    clock.sleep(450)
    audio.end("resp_1")
    assert audio.stop(None, None) == [
        AudioInterrupted("item_2", 0, 150, 300),
        AudioInterrupted("item_2", 1, 0, 300),
    ]


def test_audio_that_was_played_is_not_stopped(audio: UnplayedAudio, clock: Clock) -> None:
    audio.add("resp_1", "item_1", 0, ms(100))
    audio.end("resp_1")
    clock.sleep(100)
    assert not audio.is_playing()
    assert audio.stop(None, None) == []


def test_only_the_audio_of_an_answer_is_stopped(audio: UnplayedAudio, clock: Clock) -> None:
    audio.add("resp_1", "item_1", 0, ms(300))
    audio.end("resp_1")
    audio.add("resp_2", "item_2", 0, ms(300))
    clock.sleep(100)
    assert audio.stop("resp_2", "resp_2") == [AudioInterrupted("item_2", 0, 0, 300)]
    clock.sleep(100)
    assert audio.stop(None, None) == [AudioInterrupted("item_1", 0, 200, 300)]


def test_what_follows_moves_up_when_an_answer_before_it_is_stopped(
    audio: UnplayedAudio, clock: Clock
) -> None:
    audio.add("resp_1", "item_1", 0, ms(300))
    audio.end("resp_1")
    audio.add("resp_2", "item_2", 0, ms(300))
    clock.sleep(100)
    audio.stop("resp_1", "resp_2")
    clock.sleep(50)
    assert audio.stop(None, "resp_2") == [AudioInterrupted("item_2", 0, 50, 300)]


def test_milliseconds_are_rounded_down_so_that_the_server_takes_them(
    audio: UnplayedAudio, clock: Clock
) -> None:
    audio.add("resp_1", "item_1", 0, 48 * 100 + 40)
    clock.sleep(200)
    assert audio.stop(None, None) == [AudioInterrupted("item_1", 0, 100, 100)]


def test_other_formats_have_other_lengths(audio: UnplayedAudio, clock: Clock) -> None:
    audio.set_format("g711_ulaw")
    audio.add("resp_1", "item_1", 0, 800)
    clock.sleep(40)
    assert audio.stop(None, None) == [AudioInterrupted("item_1", 0, 40, 100)]


def test_audio_of_a_stopped_answer_is_refused_until_it_has_ended(audio: UnplayedAudio) -> None:
    audio.add("resp_1", "item_1", 0, ms(100))
    audio.stop("resp_1", "resp_1")
    assert not audio.add("resp_1", "item_1", 0, ms(100))
    assert audio.add("resp_2", "item_2", 0, ms(100))
    audio.end("resp_1")
    assert not audio.is_silenced("resp_1")


def test_an_answer_without_audio_yet_is_silenced(audio: UnplayedAudio) -> None:
    assert audio.stop(None, "resp_1") == []
    assert not audio.add("resp_1", "item_1", 0, ms(100))


def test_an_answer_that_is_not_active_is_not_silenced(audio: UnplayedAudio) -> None:
    assert audio.stop("resp_1", "resp_2") == []
    assert len(audio) == 0
    assert audio.add("resp_2", "item_2", 0, ms(100))


def test_a_long_session_does_not_grow(audio: UnplayedAudio, clock: Clock) -> None:
    for turn in range(1000):
        audio.add(f"resp_{turn}", f"item_{turn}", 0, ms(1000))
        if turn % 3 == 0:
            audio.stop(None, f"resp_{turn}")
        audio.end(f"resp_{turn}")
        clock.sleep(1000 if turn % 2 else 200)
    assert len(audio) < 32


# --- with a tracker ------------------------------------------------------------------------------


@pytest.fixture
def tracker() -> PlaybackTracker:
    return PlaybackTracker()


@pytest.fixture
def tracked(tracker: PlaybackTracker, clock: Clock) -> UnplayedAudio:
    return UnplayedAudio(tracker, clock)


def test_a_tracker_knows_better_than_the_clock(
    tracked: UnplayedAudio, tracker: PlaybackTracker, clock: Clock
) -> None:
    tracked.add("resp_1", "item_1", 0, ms(1000))
    clock.sleep(900)
    tracker.on_play_ms("item_1", 0, 120.7)
    assert tracked.stop(None, "resp_1") == [AudioInterrupted("item_1", 0, 120, 1000)]
    assert tracker.state() is None, "it was told of the interruption"


def test_a_tracker_cannot_have_played_more_than_there_is(
    tracked: UnplayedAudio, tracker: PlaybackTracker
) -> None:
    tracked.add("resp_1", "item_1", 0, ms(100))
    tracker.on_play_ms("item_1", 0, 5000)
    assert tracked.stop(None, "resp_1") == [AudioInterrupted("item_1", 0, 100, 100)]


def test_a_tracker_cannot_have_played_less_than_nothing(
    tracked: UnplayedAudio, tracker: PlaybackTracker
) -> None:
    tracked.add("resp_1", "item_1", 0, ms(100))
    tracker.on_play_ms("item_1", 0, -5)
    assert tracked.stop(None, "resp_1") == [AudioInterrupted("item_1", 0, 0, 100)]


def test_audio_that_no_tracker_has_seen_was_played_nobody_knows_how_far(
    tracked: UnplayedAudio,
) -> None:
    tracked.add("resp_1", "item_1", 0, ms(100))
    assert tracked.stop(None, "resp_1") == [AudioInterrupted("item_1", 0, None, 100)]


def test_items_before_the_one_that_is_played_were_played(
    tracked: UnplayedAudio, tracker: PlaybackTracker
) -> None:
    for number in (1, 2, 3):
        tracked.add("resp_1", f"item_{number}", 0, ms(100))
    tracker.on_play_ms("item_2", 0, 30)
    tracked.end("resp_1")
    assert tracked.stop(None, None) == [
        AudioInterrupted("item_2", 0, 30, 100),
        AudioInterrupted("item_3", 0, 0, 100),
    ]


def test_a_tracker_that_plays_another_answer_is_not_interrupted(
    tracked: UnplayedAudio, tracker: PlaybackTracker
) -> None:
    tracked.add("resp_1", "item_1", 0, ms(100))
    tracked.end("resp_1")
    tracked.add("resp_2", "item_2", 0, ms(100))
    tracker.on_play_ms("item_1", 0, 30)
    assert tracked.stop("resp_2", "resp_2") == [AudioInterrupted("item_2", 0, 0, 100)]
    assert tracker.state() == ("item_1", 0, 30)


def test_a_tracker_that_is_never_used_makes_nothing_grow(tracked: UnplayedAudio) -> None:
    for turn in range(100):
        tracked.add(f"resp_{turn}", f"item_{turn}", 0, ms(100))
        tracked.end(f"resp_{turn}")
    assert len(tracked) <= 33


def test_a_tracker_is_told_the_format(tracked: UnplayedAudio, tracker: PlaybackTracker) -> None:
    tracked.set_format("pcma")
    tracker.on_play_bytes("item_1", 0, bytes(80))
    assert tracker.state() == ("item_1", 0, 10.0)
