"""Ids of messages."""

from __future__ import annotations

import itertools
import os


class _Ids:
    """Makes ids that are unique across processes, forks included, in a tenth of a uuid's time."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self._ids = map(f"{os.urandom(8).hex()}-{{:x}}".format, itertools.count(1))

    def __call__(self) -> str:
        return next(self._ids)


new_id = _Ids()
