"""The same work on a Jupyter kernel, through its own blocking client, which is its fastest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jupyter_client import BlockingKernelClient, KernelManager

from tests.benchmarks import _work
from tests.benchmarks._measure import p50_ms, p99_ms, timed

_HANG_S = 30.0
_WARM_UP = 20
_EXECUTIONS = 500
_STARTS = 3
_OUTPUTS = 3
_CANCELS = 30
_FLOOD_CANCELS = 10


def measure() -> dict[str, float]:
    figures = {"jupyter_cold_ready_ms": p50_ms([_start_s() for _ in range(_STARTS)])}
    with kernel() as (manager, client):
        for _ in range(_WARM_UP):
            execute(client, "1+1")
        executions: list[float] = []
        for _ in range(_EXECUTIONS):
            with timed(executions):
                execute(client, "1+1")
        figures["jupyter_exec_p50_ms"] = p50_ms(executions)
        figures["jupyter_exec_p99_ms"] = p99_ms(executions)
        figures["jupyter_output_mb_s"] = max(_output_mb_s(client) for _ in range(_OUTPUTS))
        for name, source, stop_after, runs in (
            ("loop", _work.BUSY_LOOP, 1, _CANCELS),
            ("sleep", _work.SLEEP, 1, _CANCELS),
            ("flood", _work.FLOOD, _work.FLOOD_BYTES, _FLOOD_CANCELS),
        ):
            cancels = [_cancel_s(manager, client, source, stop_after) for _ in range(runs)]
            figures[f"jupyter_cancel_{name}_p50_ms"] = p50_ms(cancels)
            figures[f"jupyter_cancel_{name}_p99_ms"] = p99_ms(cancels)
    return figures


@contextmanager
def kernel() -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager = KernelManager()
    manager.start_kernel(extra_arguments=["--log-level=ERROR"])
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=_HANG_S)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _start_s() -> float:
    begun = time.perf_counter()
    with kernel():
        return time.perf_counter() - begun


def _output_mb_s(client: BlockingKernelClient) -> float:
    begun = time.perf_counter()
    received = execute(client, _work.PRINT_LINES)
    assert received == _work.LINES_BYTES, received
    return received / (time.perf_counter() - begun) / 1e6


def execute(client: BlockingKernelClient, source: str) -> int:
    """Run `source` to its end; the characters it printed."""
    request = client.execute(source)
    written = 0
    while not _is_idle(message := _next_of(client, request)):
        written += _text_size(message)
    _await_reply(client, request)
    return written


def _cancel_s(
    manager: KernelManager, client: BlockingKernelClient, source: str, stop_after: int
) -> float:
    """From the interrupt to the reply that says the execution is over."""
    request = client.execute(source)
    written = 0
    while written < stop_after:
        written += _text_size(_next_of(client, request))
    time.sleep(0.002)  # the loop, or the sleep, is entered right behind the print
    begun = time.perf_counter()
    manager.interrupt_kernel()
    while not _is_idle(_next_of(client, request)):
        pass
    reply = _await_reply(client, request)
    assert reply["content"]["ename"] == "KeyboardInterrupt", reply["content"]
    return time.perf_counter() - begun


def _next_of(client: BlockingKernelClient, request: str) -> dict[str, Any]:
    while True:
        message = client.get_iopub_msg(timeout=_HANG_S)
        if message["parent_header"].get("msg_id") == request:
            return message


def _await_reply(client: BlockingKernelClient, request: str) -> dict[str, Any]:
    while True:
        message = client.get_shell_msg(timeout=_HANG_S)
        if message["parent_header"].get("msg_id") == request:
            return message


def _is_idle(message: dict[str, Any]) -> bool:
    return message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"


def _text_size(message: dict[str, Any]) -> int:
    return len(message["content"]["text"]) if message["msg_type"] == "stream" else 0
