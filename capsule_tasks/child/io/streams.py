"""The text streams of a session: `sys.stdout` and `sys.stderr`, and what they share with stdin."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable

from capsule_tasks.child.io.sink import OutputSink, StderrText
from capsule_tasks.child.stopping.deferred_stop import deferred_stop, interruptible


class SessionStream(io.TextIOBase):
    """`sys.stdin`, `sys.stdout` or `sys.stderr` of a session; there is no terminal behind it."""

    def isatty(self) -> bool:
        return False

    def reconfigure(self, **_options: object) -> None:
        """Accept the call, with which many programs start, and change nothing."""

    def close(self) -> None:
        """Stay open: later executions use the same stream (`quit()` closes its input)."""


class CapturedStream(SessionStream):
    """`sys.stdout` or `sys.stderr` of a session: text goes to the sink of the caller's context."""

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = write_through = False

    def __init__(
        self,
        descriptor: int,
        context_sink: Callable[[], OutputSink | None],
        owner: Callable[[], OutputSink],
    ) -> None:
        """`owner` finds the sink of a caller whose context names none."""
        self._owner = owner
        self._descriptor = descriptor
        self.mode = "w"
        self.name = "<stderr>" if descriptor == 2 else "<stdout>"
        self.buffer = _Buffer(self)
        self.write = self._make_write(context_sink, owner)  # type: ignore[method-assign]

    def _make_write(
        self, context_sink: Callable[[], OutputSink | None], owner: Callable[[], OutputSink]
    ) -> Callable[[str], int]:
        """`write` as a function of this stream: found and called faster, a `print` takes 3/4."""
        is_stderr = self._descriptor == 2
        kind = StderrText if is_stderr else str

        @interruptible
        def write(text: str) -> int:
            sink = context_sink()
            if sink is None:
                sink = owner()
            if type(text) is not kind:  # always so for stderr
                text = kind(text if type(text) is str else _plain(text))
                if is_stderr:
                    # Set before the text is appended: a flush in between would send it as stdout.
                    sink.uses_stderr = True
            sink.parts.append(text)
            count = len(text)
            size = sink.size = sink.size + count
            if size >= sink.flush_at_chars:
                sink.flush_if_due()
                if deferred_stop.is_pending:
                    deferred_stop.raise_pending()
            return count

        return write

    @interruptible
    def flush(self) -> None:
        self._owner().flush_ready()
        if deferred_stop.is_pending:
            deferred_stop.raise_pending()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """The raw descriptor. Bytes written there are sent too, in no order with the text."""
        return self._descriptor


class _Buffer(io.RawIOBase):
    """`sys.stdout.buffer`: bytes are decoded as UTF-8 and written to the text stream."""

    def __init__(self, text: CapturedStream) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    @interruptible
    def write(self, data: object) -> int:
        raw = memoryview(data)  # type: ignore[arg-type]
        self._text.write(self._decoder.decode(bytes(raw)))
        return raw.nbytes

    @interruptible
    def flush(self) -> None:
        self._text.write(self._decoder.decode(b"", final=True))
        self._text.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._text.fileno()

    def close(self) -> None:
        """Stay open, like the text stream."""


def _plain(text: object) -> str:
    """The characters of a string without its class, whose methods are user code."""
    if not isinstance(text, str):
        raise TypeError(f"write() argument must be str, not {type(text).__name__}")
    return str.__str__(text)


def plain_streams() -> tuple[io.TextIOWrapper, io.TextIOWrapper]:
    """Ordinary unbuffered text streams on descriptors 1 and 2."""
    out, err = (
        io.TextIOWrapper(
            io.FileIO(descriptor, "w", closefd=False),
            "utf-8",
            "backslashreplace",
            write_through=True,
        )
        for descriptor in (1, 2)
    )
    return out, err
