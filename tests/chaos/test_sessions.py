"""A storm over eight sessions: whatever breaks, every execution ends once and nothing is left."""

from __future__ import annotations

import random

import pytest

from capsule_tasks.sessions import Session, SessionState
from tests.chaos.census import Census, resident_mib
from tests.chaos.faults import FAULTS
from tests.chaos.recorder import Recorder
from tests.chaos.storm import SCALE, SEED, SHARES, STEP_S, config, storm, unhandled_errors

pytestmark = pytest.mark.chaos

SESSIONS = 8
GROWTH_MIB = 24.0


@pytest.mark.parametrize("share", SHARES)
async def test_every_execution_ends_once_and_nothing_is_left(share: int) -> None:
    print(f"CAPSULE_CHAOS_SEED={SEED}")  # noqa: T201 - shown when the test fails
    rng = random.Random(f"{SEED} {share}")
    faults = max(len(FAULTS), round(200 * SCALE / len(SHARES)))
    plan = [FAULTS[i % len(FAULTS)] for i in range(faults)]
    rng.shuffle(plan)
    with unhandled_errors() as unhandled:
        census = Census()
        recorders = [Recorder(Session(config(rng, census, n))) for n in range(SESSIONS)]
        for recorder in recorders:
            await recorder.within(STEP_S, "start", recorder.session.start())
        before_mib = resident_mib()
        try:
            await storm(recorders, rng, plan, census)
        finally:
            for recorder in recorders:
                await recorder.within(STEP_S, "shutdown", recorder.session.shutdown())
        grown_mib = resident_mib() - before_mib
        assert all(r.session.state is SessionState.TERMINATED for r in recorders)
        del recorders, recorder
        await census.back_to_start()
    assert not unhandled, unhandled
    assert grown_mib < GROWTH_MIB, f"memory grew by {grown_mib:.1f} MiB over {faults} faults"
