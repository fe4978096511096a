"""The programs in `examples/`, with a real worker and the stand-in for a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capsule_tasks.testing import PrivateServer
from tests.acceptance.workers import HANG_S, ROOT, eventually

EXAMPLES = ROOT / "examples"
Program = Callable[..., str]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Runs a program beside a worker of `support.py`; the text that it prints."""
    directory = tmp_path_factory.mktemp("examples")
    with PrivateServer(directory / "redis") as server:
        yield from beside_a_worker("support", server.url, directory / "worker.log")


@pytest.fixture(scope="module")
def program_of_ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Runs a program beside a worker of `shop.py`, the agents of our own engine."""
    directory = tmp_path_factory.mktemp("shop")
    with PrivateServer(directory / "redis") as server:
        yield from beside_a_worker("shop", server.url, directory / "worker.log")


def beside_a_worker(app: str, redis_url: str, log_file: Path) -> Iterator[Program]:
    environment = {**os.environ, "REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}
    environment.pop("OPENAI_API_KEY", None)
    command = [sys.executable, "-m", "celery", "-A", app, "worker", "-c", "1"]
    with log_file.open("wb") as log:
        worker = subprocess.Popen(
            [*command, "-l", "INFO", "--without-mingle", "--without-gossip"],
            cwd=EXAMPLES,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    eventually(lambda: " ready." in log_file.read_text(), "a worker that is ready")

    def run(*words: str, answers: str = "") -> str:
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=EXAMPLES,
            env=environment,
            input=answers,
            capture_output=True,
            text=True,
            timeout=2 * HANG_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr + log_file.read_text()
        return ended.stdout

    yield run
    worker.terminate()
    worker.wait(HANG_S)


def test_a_support_agent_refunds_what_a_person_approves(program: Program) -> None:
    printed = program("support.py", "Refund order 42.")
    assert printed.splitlines()[0] == "Order 42: 42 euros refunded"
    assert printed.splitlines()[1].startswith("3 requests, ")
    printed = program("support.py", "Refund order 72.", answers="y\n")
    question = 'Support calls bare:refund {"order":72,"euros":72}. Approve it? [y/n] '
    assert printed.startswith(f"{question}Order 72: 72 euros refunded\n")
    printed = program("support.py", "Refund order 73.", answers="n\n")
    assert "Order 73: A person has refused this refund.\n" in printed


def test_a_hundred_runs_end_though_some_wait_for_a_person(program: Program) -> None:
    assert program("batch.py") == "100 runs ended: 90 refunds, 50 decisions\n"
    listed = program("-m", "celery", "-A", "support", "capsule", "runs", "list", "--limit", "200")
    assert listed.count(": agent support, completed since ") >= 100


def test_a_refund_of_our_own_engine_is_a_task_that_a_person_approves(
    program_of_ours: Program,
) -> None:
    printed = program_of_ours("refunds.py", "Refund order 42.")
    assert printed == "Order 42: 42 euros refunded\n"
    printed = program_of_ours("refunds.py", "Refund order 72.", answers="y\n")
    question = 'Refunds calls bare:refund {"order": 72, "euros": 72}. Approve it? [y/n] '
    assert printed == f"{question}Order 72: 72 euros refunded\n"
    printed = program_of_ours("refunds.py", "Refund order 73.", answers="n\n")
    assert "Order 73: A person has refused this refund.\n" in printed


def test_an_analyst_finds_the_names_of_its_last_run_again(program_of_ours: Program) -> None:
    printed = program_of_ours("analyst.py", "Compute this: total = sum(range(101)); total")
    assert printed == "It gives 5050\n"
    assert program_of_ours("analyst.py", "Compute this: total * 2") == "It gives 10100\n"


def test_a_triage_hands_over_in_process_and_in_a_worker(program_of_ours: Program) -> None:
    printed = program_of_ours("triage.py", "Where is my invoice?")
    assert printed == "[Triage] [Billing] Billing: Where is my invoice? We will see to it.\n"
    printed = program_of_ours("triage.py", "Where is my parcel?", "--durable")
    assert printed == "Shipping: Where is my parcel? We will see to it.\n"


def test_a_front_desk_talks_and_goes_on_where_it_was(program_of_ours: Program) -> None:
    lines = "Refund order 72.", "y", "Where is my invoice?", ""
    printed = program_of_ours("front_desk.py", answers="\n".join(lines))
    assert printed == (
        "> look_up: 72 euros were paid\n"
        'refund {"order": 72, "euros": 72}. Approve it? [y/n] refund: 72 euros refunded\n'
        "Order 72: 72 euros refunded\n"
        "> Billing takes over.\n"
        "Your invoice is on its way.\n"
        "> "
    )
    printed = program_of_ours("front_desk.py", answers="Hello!\n")
    assert printed == "> How can I help you? You said before: Where is my invoice?\n> "


def test_ctrl_c_ends_a_front_desk_that_waits_for_a_line(tmp_path: Path) -> None:
    with PrivateServer(tmp_path) as server:
        environment = {**os.environ, "REDIS_URL": server.url, "PYTHONPATH": str(ROOT)}
        environment.pop("OPENAI_API_KEY", None)
        desk = subprocess.Popen(
            [sys.executable, "front_desk.py"],
            cwd=EXAMPLES,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with desk:
            assert desk.stdout is not None
            assert desk.stdout.read(2) == b"> "
            desk.send_signal(signal.SIGINT)
            try:
                assert desk.wait(HANG_S) == 130
            finally:
                desk.kill()
            assert desk.stdout.read() == b""
