"""A worker in a process of its own that goes on with a parked run of openai-agents.

python openai_worker.py URL PREFIX
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from capsule_tasks.settings import LeaseSettings, RunSettings
from capsule_tasks.storage.runs.store import Lease, RunStore
from tests.agents_script import ScriptedModel, says
from tests.integration.openai_tools import Worker, agent_of, outer_agent


async def main(url: str, prefix: str) -> None:
    done: list[object] = []
    models = {name: ScriptedModel(says(name)) for name in "ab"}
    outer = ScriptedModel(says("done"))
    async with (
        Lease("w2", url, settings=LeaseSettings(lease_s=600), prefix=prefix) as lease,
        RunStore(url, settings=RunSettings(prefix=prefix)) as store,
    ):
        await lease.acquire()
        agents = (agent_of(model, done, name) for name, model in models.items())
        agent = outer_agent(outer, *agents)
        status = await Worker(store, lambda: agent, "w2").go_on()
    sys.stdout.write(json.dumps({"status": status, "done": done}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
