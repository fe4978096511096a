"""Drives durable runs: turn by turn, so that a killed worker costs at most the turn that was cut.

What Redis has is authoritative: the snapshot of the last committed turn, the replies of the model
since then (the journal), and the tool calls that were started and finished (the ledger). A turn is
computed by an `Engine`, which knows an agent library and nothing of storage. `RunDriver` claims a
run, drives its turns, and commits each of them with its history items in one script. A turn that
was cut is computed again by the next owner: its finished model calls and tool calls are answered
from the journal and the ledger, so that neither happens twice.
"""

from capsule_tasks.durable.driver import RunDriver, RunStop
from capsule_tasks.durable.engine import (
    Engine,
    Ledger,
    ModelCall,
    OnUncertain,
    RunFailure,
    ToolCall,
    ToolOutcome,
    TurnEnd,
    TurnWork,
)
from capsule_tasks.durable.inputs import INPUT_SCHEMA, RunInput, first_snapshot, input_of
from capsule_tasks.durable.ledger import TurnStopped
from capsule_tasks.durable.settling import settle
from capsule_tasks.protocol.messages import RunEvent

__all__ = [
    "INPUT_SCHEMA",
    "Engine",
    "Ledger",
    "ModelCall",
    "OnUncertain",
    "RunDriver",
    "RunEvent",
    "RunFailure",
    "RunInput",
    "RunStop",
    "ToolCall",
    "ToolOutcome",
    "TurnEnd",
    "TurnStopped",
    "TurnWork",
    "first_snapshot",
    "input_of",
    "settle",
]
