"""Raw output of a dead child is read to its end, and never for longer than there was some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from capsule_tasks.protocol.messages import Stream
from capsule_tasks.sessions.process.channel import RawOutput


class _Loop:
    """Never says that a descriptor is readable."""

    def add_reader(self, *_: object) -> None: ...

    def remove_reader(self, *_: object) -> None: ...


def _finish(descriptor: int) -> str:
    heard: list[str] = []

    def deliver(_stream: Stream, text: str, _count: int) -> bool:
        heard.append(text)
        return False

    loop: Any = _Loop()
    output = RawOutput(loop, descriptor, "stdout", deliver)
    output.finish()
    output.catch_up()  # nothing more, though the descriptor may be another's by now
    return "".join(heard)


def test_more_output_than_a_user_may_have_in_a_pipe_is_read_whole(tmp_path: Path) -> None:
    """A file stands in for the larger pipe of a privileged user."""
    text = "0123456789abcdef" * (3 * 1024 * 1024 // 16)
    (tmp_path / "output").write_text(text)
    with (tmp_path / "output").open("rb", buffering=0) as file:
        assert _finish(file.fileno()) == text


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    reader, writer = os.pipe()
    try:
        os.set_blocking(reader, False)
        os.write(writer, "né".encode()[:-1])
        assert _finish(reader) == "n\N{REPLACEMENT CHARACTER}"
    finally:
        os.close(reader)
        os.close(writer)
