"""An app with a task whose argument may be as large as one likes."""

from __future__ import annotations

from tests.acceptance.app import app


@app.task(name="tests.acceptance.large_app.size")
def size(text: str) -> int:
    return len(text)


__all__ = ["app"]
