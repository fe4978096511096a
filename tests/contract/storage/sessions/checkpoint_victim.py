"""Writes one checkpoint and kills itself before or after its nth step: a call of Redis or a file.

python -m … REDIS_URL PREFIX PLACE TOKEN before|after STEP
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.settings import NamedSessionSettings
from capsule_tasks.storage import AsyncConnections
from capsule_tasks.storage.sessions.blobs import BlobChunks, checkpoint_store

NEWER = SavedNamespace(pieces=(b"new", b"er"))


class Killer:
    """Counts steps, and kills the process at one of them."""

    def __init__(self, moment: str, step: int) -> None:
        self._moment = moment
        self._step = step
        self._taken = 0

    def count(self, moment: str) -> None:
        self._taken += moment == "before"
        if (moment, self._taken) == (self._moment, self._step):
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count("before")
            result = call(*args, **kwargs)
            self.count("after")
            return result

        return counted

    def around_async(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.count("before")
            result = await call(*args, **kwargs)
            self.count("after")
            return result

        return counted


async def main(url: str, prefix: str, place: str, token: int, killer: Killer) -> None:
    connections: Any = AsyncConnections(url)
    connections.run = killer.around_async(connections.run)
    store = checkpoint_store(connections, place, settings=NamedSessionSettings(prefix=prefix))
    chunks: Any = store._place
    if isinstance(chunks, BlobChunks):
        files: Any = chunks._files
        for name in ("makedirs", "open", "rm_file"):
            setattr(files, name, killer.around(getattr(files, name)))
    await store.write("s", token, NEWER)
    await connections.close()


if __name__ == "__main__":
    url, prefix, place, token, moment, step = sys.argv[1:]
    asyncio.run(main(url, prefix, place, int(token), Killer(moment, int(step))))
