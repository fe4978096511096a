"""The scripts that the tests of this folder call."""

from __future__ import annotations

from tests.lua.workers.bench import BY_NAME


def test_all_scripts_of_workers_are_here() -> None:
    assert set(BY_NAME) == {
        *("workers/lease_acquire", "workers/lease_renew", "workers/lease_read"),
        *("workers/hold", "workers/held", "workers/register"),
    }
