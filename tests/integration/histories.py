"""Settings of histories with which tests need not wait."""

from __future__ import annotations

from typing import Any

from capsule_tasks.settings import HistorySettings, RetrySettings
from tests.servers import fresh_prefix

ONCE = RetrySettings(attempts=1)
QUICK = RetrySettings(attempts=3, first_delay_s=0.001, max_delay_s=0.01)


def own_settings(retry: RetrySettings = QUICK, **changes: Any) -> HistorySettings:
    return HistorySettings(prefix=fresh_prefix(), retry=retry, **changes)
