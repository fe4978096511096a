"""How much audio of the model's answers was played to the user."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from capsule_tasks.realtime.model import AudioInterrupted
from capsule_tasks.realtime.settings import AudioFormat, Playback

_G711 = frozenset({"g711_ulaw", "g711_alaw", "pcmu", "pcma", "audio/pcmu", "audio/pcma"})
_PCM_RATE = 24_000
_ROUNDING_MS = 0.001
_MAX_ENDED_ITEMS = 32
"""Items of ended answers that are remembered, however little a tracker tells of their playback."""


def bytes_per_ms(audio_format: AudioFormat | None) -> float:
    """The bytes of a millisecond. Formats that are not known count as PCM of 16 bits and 24 kHz."""
    given = audio_format if isinstance(audio_format, Mapping) else {"type": audio_format}
    if given.get("type") in _G711:
        return 8.0
    rate = given.get("rate")
    return 2 * (rate if isinstance(rate, int) and rate else _PCM_RATE) / 1000


class PlaybackTracker:
    """Is told by whoever plays the audio how much of it was played.

    Without one, audio counts as played at once and at its own speed.
    """

    def __init__(self) -> None:
        self._bytes_per_ms = bytes_per_ms(None)
        self._playing: tuple[str, int] | None = None
        self._played_ms = 0.0

    def on_play_bytes(self, item_id: str, content_index: int, data: bytes) -> None:
        """This audio of an item was played, after what was played of it before."""
        self.on_play_ms(item_id, content_index, len(data) / self._bytes_per_ms)

    def on_play_ms(self, item_id: str, content_index: int, ms: float) -> None:
        """So much more audio of an item was played."""
        if self._playing != (item_id, content_index):
            self._playing = (item_id, content_index)
            self._played_ms = 0.0
        self._played_ms += ms

    def on_interrupted(self) -> None:
        """Nothing is being played any more."""
        self._playing = None

    def set_audio_format(self, audio_format: AudioFormat) -> None:
        """The format of the audio; the model tells it."""
        self._bytes_per_ms = bytes_per_ms(audio_format)

    def state(self) -> tuple[str, int, float] | None:
        """The item that is being played, its content's index, and the ms played; None if none."""
        return None if self._playing is None else (*self._playing, self._played_ms)


class _Audio:
    """The audio of an item that has come."""

    __slots__ = ("has_ended", "ms", "response_id")

    def __init__(self, response_id: str) -> None:
        self.response_id = response_id
        self.ms = 0.0
        self.has_ended = False
        """Whether no more of it can come."""


class UnplayedAudio:
    """The audio of answers that may still be playing, or be played later, in order.

    Audio is forgotten when its answer has ended, and its playback is over or was stopped.
    """

    def __init__(
        self, tracker: Playback | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tracker = tracker
        self._clock = clock
        self._bytes_per_ms = bytes_per_ms(None)
        self._audio: dict[tuple[str, int], _Audio] = {}
        self._silenced: set[str] = set()
        """Active answers whose audio is not to be played."""
        self._plays_until_s = 0.0
        """When everything that has come is played, without a tracker."""

    def __len__(self) -> int:
        return len(self._audio) + len(self._silenced)

    def set_format(self, audio_format: AudioFormat) -> None:
        self._bytes_per_ms = bytes_per_ms(audio_format)
        if self._tracker is not None:
            self._tracker.set_audio_format(audio_format)

    def add(self, response_id: str, item_id: str, content_index: int, byte_count: int) -> bool:
        """Note audio that has come; whether it is to be played, as its answer was not stopped."""
        if response_id in self._silenced:
            return False
        audio = self._audio.setdefault((item_id, content_index), _Audio(response_id))
        ms = byte_count / self._bytes_per_ms
        audio.ms += ms
        # A player that had nothing left to play goes on when the next audio comes.
        self._plays_until_s = max(self._plays_until_s, self._clock()) + ms / 1000
        return True

    def silence(self, response_id: str) -> None:
        """Audio of an active answer is not to be played."""
        self._silenced.add(response_id)

    def is_silenced(self, response_id: str) -> bool:
        return response_id in self._silenced

    def end(self, response_id: str) -> None:
        """An answer has ended: no more audio of it comes."""
        self._silenced.discard(response_id)
        for audio in self._audio.values():
            audio.has_ended |= audio.response_id == response_id
        self._forget_played()

    def is_playing(self) -> bool:
        """Whether any audio is not known to be played to its end."""
        self._forget_played()
        return bool(self._audio)

    def stop(self, response_id: str | None, active_id: str | None) -> list[AudioInterrupted]:
        """Stop the playback of an answer, or of all with None; what was stopped, in order.

        More audio of the active answer, if it is meant, is not to be played.
        """
        if active_id is not None and response_id in {None, active_id}:
            self.silence(active_id)
        self._forget_played()
        stopped = []
        for key, played_ms in self._played_ms().items():
            audio = self._audio[key]
            if response_id not in {None, audio.response_id}:
                continue
            del self._audio[key]
            whole_ms, total_ms = None, int(audio.ms)
            if played_ms is not None:
                self._plays_until_s -= (audio.ms - played_ms) / 1000
                whole_ms = min(int(played_ms + _ROUNDING_MS), total_ms)
            stopped.append(AudioInterrupted(*key, whole_ms, total_ms))
        if stopped and self._tracker is not None:
            playing = self._tracker.state()
            if playing is None or playing[:2] in {(it.item_id, it.content_index) for it in stopped}:
                self._tracker.on_interrupted()
        return stopped

    def _forget_played(self) -> None:
        played = self._played_ms()
        ended = [key for key, audio in self._audio.items() if audio.has_ended]
        for place, key in enumerate(ended):
            played_ms = played[key]
            is_played = played_ms is not None and played_ms + _ROUNDING_MS >= self._audio[key].ms
            if is_played or place < len(ended) - _MAX_ENDED_ITEMS:
                del self._audio[key]

    def _played_ms(self) -> dict[tuple[str, int], float | None]:
        """The ms played of each item; None where a tracker says nothing."""
        played: dict[tuple[str, int], float | None] = dict.fromkeys(self._audio)
        if self._tracker is None:
            left_ms = max(self._plays_until_s - self._clock(), 0.0) * 1000
            for key, audio in reversed(self._audio.items()):
                played[key] = max(audio.ms - left_ms, 0.0)
                left_ms = max(left_ms - audio.ms, 0.0)
        elif (playing := self._tracker.state()) is not None:
            # Items are played in order. One that is not here was played before all of these.
            is_before = playing[:2] in self._audio
            for key, audio in self._audio.items():
                if key == playing[:2]:
                    played[key] = max(min(playing[2], audio.ms), 0.0)
                    is_before = False
                else:
                    played[key] = audio.ms if is_before else 0.0
        return played
