"""Steps of tasks in a dict: the store of eager tasks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from capsule_tasks.errors import InternalError
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call, Code

Args = dict[str, Any]


@dataclass
class _Step:
    operation_id: str
    fingerprint: str
    started_ms: int
    why_uncertain: bytes = b""
    output: bytes | None = None


class StepsInMemory:
    """Stores steps in memory, with the replies that the scripts in Redis give; thread-safe."""

    is_closed = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[tuple[str, str], _Step] = {}
        """By key of the execution and name of the step."""

    async def run(self, call: Call) -> Reply:
        return self.run_blocking(call)

    def run_blocking(self, call: Call) -> Reply:
        args: Args = dict(zip(call.script.args, call.args, strict=True))
        with self._lock:
            match call.script.name:
                case "executions/step_start":
                    return self._start((call.keys[0], args["step"]), args)
                case "executions/step_end":
                    return self._end((call.keys[0], args["step"]), args)
                case "operation_abandon":  # no call is in flight that could arrive later
                    return [Code.DONE, 0]
        raise InternalError(f"StepsInMemory has no script {call.script.name!r}")

    def _start(self, at: tuple[str, str], args: Args) -> Reply:
        step = self._steps.get(at)
        if step is not None and step.fingerprint != args["fingerprint"]:
            return [Code.CHANGED]
        if step is not None and step.output is not None:
            return [Code.FINISHED, step.output]
        if step is not None and not args["retry"]:
            return [Code.UNCERTAIN, step.started_ms, step.why_uncertain]
        self._steps[at] = _Step(args["operation_id"], args["fingerprint"], int(time.time() * 1000))
        return [Code.DONE]

    def _end(self, at: tuple[str, str], args: Args) -> Reply:
        step = self._steps.get(at)
        if step is not None and step.output is not None:
            return [Code.DONE, step.output]  # the first output that was stored counts
        has_started_it = step is not None and step.operation_id == args["start_operation"]
        match args["outcome"]:
            case "output" if step is not None:
                step.output = args["value"]
            case "undone" if has_started_it:
                del self._steps[at]
            case "failed" if step is not None and has_started_it:
                step.why_uncertain = args["value"]
        return [Code.DONE, args["value"] if args["outcome"] == "output" else b""]
