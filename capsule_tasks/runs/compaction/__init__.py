"""Compaction: the old part of a history is replaced by something shorter, in one step."""

from capsule_tasks.runs.compaction.compacting import CompactionReport, compact, compact_sync
from capsule_tasks.runs.compaction.compactors import (
    Compactor,
    OldItems,
    ResponsesCompactor,
    SummaryCompactor,
    summary_message,
)
from capsule_tasks.runs.compaction.policy import Compaction

__all__ = [
    "Compaction",
    "CompactionReport",
    "Compactor",
    "OldItems",
    "ResponsesCompactor",
    "SummaryCompactor",
    "compact",
    "compact_sync",
    "summary_message",
]
