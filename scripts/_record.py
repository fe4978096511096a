"""Record two terminals, a watcher and a caller of the quickstart's tasks, as an animated SVG.

Everything that is shown was printed by real processes, at the times at which the picture shows it,
except that no pause is longer than MAX_PAUSE_S.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape, unescape

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from capsule_tasks.testing.servers import PrivateServer  # noqa: E402 - the path comes first

RECORDING = ROOT / "docs/images/recording.svg"
QUICKSTART = ROOT / "docs/quickstart.md"
CALLER, WATCHER = "Python, in any process", "a terminal, on any machine"
PANES = (CALLER, WATCHER)

READY_S = 60.0
MAX_PAUSE_S = 1.2
TYPING_S = 0.8
"""How long a line that is typed takes, as no keys are pressed here."""
REST_S = 4.0
"""How long the last state is shown before the picture starts again."""

PROMPT = ">>> "
COLUMNS = 88
LINE_PX, CHAR_PX, FONT_PX, MARGIN_PX = 18, 7.83, 13, 14


class Line(NamedTuple):
    at_s: float
    pane: str
    text: str


class Recording:
    """Lines of several terminals, in the order in which they appeared."""

    def __init__(self, typing_s: float) -> None:
        self.lines: list[Line] = []
        self._typing_s = typing_s

    def show(self, pane: str, text: str) -> None:
        self.lines.append(Line(time.monotonic(), pane, text))

    def type(self, pane: str, text: str) -> None:
        time.sleep(self._typing_s)
        self.show(pane, text)

    def timed(self) -> list[Line]:
        """The lines with their time since the first one, without long pauses."""
        shown: list[Line] = []
        last_s = elapsed_s = 0.0
        for line in self.lines:
            elapsed_s += min(line.at_s - (last_s or line.at_s), MAX_PAUSE_S)
            last_s = line.at_s
            shown.append(line._replace(at_s=elapsed_s))
        return shown


class Prompt:
    """A real `python -i`, one line at a time."""

    def __init__(self, recording: Recording, environment: dict[str, str]) -> None:
        self._recording = recording
        self._process = subprocess.Popen(
            [sys.executable, "-q", "-i"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self._read_answer()

    def run(self, source: str) -> str:
        """Run a line, and show it with its answer."""
        self._recording.type(CALLER, f"{PROMPT}{source}")
        answer = self.run_hidden(source)
        for line in answer.splitlines():
            self._recording.show(CALLER, line)
        return answer

    def run_hidden(self, source: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{source}\n")
        self._process.stdin.flush()
        return self._read_answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read_answer(self) -> str:
        assert self._process.stdout is not None
        answer = ""
        while not answer.endswith(PROMPT):
            if not (character := self._process.stdout.read(1)):
                raise RuntimeError(f"the Python prompt ended: {answer}")
            answer += character
        return answer.removesuffix(PROMPT)


class Watch:
    """A command in the watcher's terminal, until it ends."""

    def __init__(self, recording: Recording, command: str, environment: dict[str, str]) -> None:
        self._recording = recording
        self._seen: set[str] = set()
        self._changed = threading.Condition()
        recording.type(WATCHER, f"$ {command}")
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_for(self, start: str) -> None:
        """Return when a line that starts so was printed."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: any(line.startswith(start) for line in self._seen), READY_S
            ):
                raise RuntimeError(f"no line starts with {start!r} among {sorted(self._seen)}")

    def wait(self) -> None:
        self._thread.join()
        self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._recording.show(WATCHER, line.rstrip())
            with self._changed:
                self._seen.add(line)
                self._changed.notify_all()


def record(typing_s: float = TYPING_S) -> list[Line]:
    """Watch a task, answer it, and cancel another one; what both terminals showed."""
    recording = Recording(typing_s)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(PrivateServer())
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(directory),
            "PYTHONUNBUFFERED": "1",
            "REDIS_URL": server.url,
        }
        (directory / "shop.py").write_text(shop_source())
        stack.enter_context(worker(directory, environment))
        prompt = Prompt(recording, environment)
        stack.callback(prompt.close)

        def watch(execution_id: str) -> Watch:
            # Before its start `tail` would say that it waits, which depends on the machine's load.
            prompt.run_hidden("while execution.snapshot().state != 'running': pass\n")
            command = f"celery -A shop capsule tail {execution_id.strip()}"
            watching = Watch(recording, command, environment)
            stack.callback(watching.close)
            return watching

        prompt.run_hidden("import time; from shop import app, report, spin")
        prompt.run_hidden("while not app.control.ping(timeout=0.5): pass\n")
        prompt.run("execution = report.delay(2026); print(execution.id)")
        watching = watch(prompt.run_hidden("print(execution.id)"))
        watching.wait_for("-- 4/4")
        prompt.run("execution.respond('yes')")
        prompt.run("execution.get()")
        watching.wait()

        prompt.run("execution = spin.delay(); print(execution.id)")
        watching = watch(prompt.run_hidden("print(execution.id)"))
        watching.wait_for("this loop never ends")
        prompt.run("cancelled_at = time.time(); execution.cancel()")
        watching.wait()
        prompt.run("round(execution.snapshot().ended_at - cancelled_at, 4)  # seconds")
    return recording.timed()


def shop_source() -> str:
    """The app of the quickstart."""
    found = re.search(r"^```python\n(.*?)^```$", QUICKSTART.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{QUICKSTART} has no example"
    return found[1]


@contextmanager
def worker(directory: Path, environment: dict[str, str]) -> Iterator[None]:
    command = ["celery", "-A", "shop", "worker", "-n", "ada@shop", "-c", "2"]
    with (directory / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(READY_S)


# --- the picture ---------------------------------------------------------------------------------


def picture(lines: list[Line]) -> str:
    """An SVG in which each line appears at its time. Without animation, all lines are visible."""
    duration_s = lines[-1].at_s + REST_S
    width = round(COLUMNS * CHAR_PX + 2 * MARGIN_PX)
    styles, body = [], []
    top = 0
    for pane in PANES:
        shown = [(number, line) for number, line in enumerate(lines) if line.pane == pane]
        height = (len(shown) + 2) * LINE_PX
        body.append(f'<rect class="pane" y="{top}" width="{width}" height="{height}" rx="8"/>')
        body.append(f'<text class="title" x="{MARGIN_PX}" y="{top + LINE_PX}">{pane}</text>')
        for row, (number, line) in enumerate(shown, start=2):
            body.append(
                f'<text id="l{number}" class="{_class_of(line)}" data-pane="{pane}" '
                f'x="{MARGIN_PX}" y="{top + row * LINE_PX}">{escape(line.text)}</text>'
            )
            share = line.at_s / duration_s * 100
            if share:
                styles.append(f"@keyframes k{number}{{0%{{opacity:0}}{share:.2f}%{{opacity:1}}}}")
                styles.append(f"#l{number}{{animation-name:k{number}}}")
        top += height + LINE_PX // 2
    style = "\n".join((_STYLE.replace("DURATION", f"{duration_s:.2f}s"), *styles))
    height = top - LINE_PX // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">\n'
        f"<title>A task is watched, answered and cancelled from two terminals</title>\n"
        f"<style>\n{style}\n</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


_STYLE = f"""\
text {{ font: {FONT_PX}px ui-monospace, Menlo, Consolas, monospace; white-space: pre;
  fill: #d7dde5; animation: DURATION step-end infinite; }}
.pane {{ fill: #14181f; }}
.title {{ fill: #6b7685; animation: none; }}
.typed {{ fill: #7ee0a1; }}
.event {{ fill: #8fa3bf; }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none !important; }} }}"""


def _class_of(line: Line) -> str:
    if line.text.startswith((PROMPT, "$ ")):
        return "typed"
    return "event" if line.text.startswith("--") else "printed"


def transcript(svg: str) -> list[tuple[str, str]]:
    """The lines, pane by pane, without what differs between two recordings."""
    shown = re.findall(r'data-pane="([^"]+)" [^>]*>([^<]*)<', svg)
    return [(pane, re.sub(r"[0-9a-f-]{36}|0\.\d+", "…", unescape(text))) for pane, text in shown]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/record", description=__doc__)
    parser.add_argument("--output", type=Path, default=RECORDING)
    output = parser.parse_args().output
    lines = record()
    output.write_text(picture(lines))
    print(f"{output}: {len(lines)} lines, {lines[-1].at_s:.1f} s")


if __name__ == "__main__":
    main()
