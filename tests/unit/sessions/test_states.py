"""The states of a session: the picture in the docs, the table, and what moves a real session."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from capsule_tasks.errors import SessionStateError
from capsule_tasks.sessions import Session, lifecycle, states
from capsule_tasks.sessions.states import (
    ACCEPTING,
    ALIVE,
    OVER,
    TRANSITIONS,
    SessionState,
)

PAGE = (Path(__file__).parents[3] / "docs" / "session.md").read_text()
EDGE = re.compile(r"^ *(\S+) --> (\S+?)(?:: (.+))?$", re.MULTILINE)
ROW = re.compile(r"^\| ([A-Z_]+) \|", re.MULTILINE)
S = SessionState


def may_move(start: SessionState, end: SessionState) -> bool:
    return end in TRANSITIONS[start]


def drawn() -> dict[tuple[str, str], str]:
    return {(start, end): why for start, end, why in EDGE.findall(PAGE) if start != "[*]"}


def test_the_diagram_in_the_docs_has_the_edges_of_the_table_and_no_others() -> None:
    table = {(start.name, end.name) for start, ends in TRANSITIONS.items() for end in ends}
    assert set(drawn()) == table
    assert len(EDGE.findall(PAGE)) == len(table) + 1
    assert "[*] --> CREATING" in PAGE


def test_the_docs_explain_each_state() -> None:
    assert ROW.findall(PAGE) == [state.name for state in SessionState]
    source = inspect.getsource(states.SessionState)
    assert source.count('"""') == 2 * (1 + len(SessionState))


def test_every_state_has_a_row_in_the_table_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(SessionState)
    reached = {S.CREATING}
    for _ in SessionState:
        reached |= {end for start in reached for end in TRANSITIONS[start]}
    assert reached == set(SessionState)


def test_no_state_leads_to_itself() -> None:
    assert not any(may_move(state, state) for state in SessionState)


def test_a_terminal_state_is_left_by_restart_alone() -> None:
    for state in OVER:
        assert TRANSITIONS[state] <= {S.CREATING} | OVER
    for (start, end), why in drawn().items():
        assert (why == "restart") == (end == "CREATING"), (start, end)
        if end == "CREATING":
            assert S[start] in OVER


def test_nothing_but_restart_enters_creating() -> None:
    tree = ast.parse(inspect.getsource(lifecycle))
    makers = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "self._move"
        and "CREATING" in ast.unparse(call)
    }
    assert makers == {"_restart"}


def test_shutting_down_ends_nowhere_but_terminated() -> None:
    assert TRANSITIONS[S.SHUTTING_DOWN] == {S.TERMINATED}


def test_the_predicates_agree_with_the_table() -> None:
    assert {state for state in SessionState if may_move(state, S.BUSY)} | {S.BUSY} == ACCEPTING
    assert not ALIVE & OVER
    assert ACCEPTING < ALIVE
    assert all(may_move(state, S.SHUTTING_DOWN) for state in ALIVE)
    assert all(may_move(state, S.ERROR) for state in ALIVE)


@pytest.mark.parametrize("start", SessionState)
@pytest.mark.parametrize("end", SessionState)
async def test_a_session_makes_the_moves_of_the_table_and_no_others(
    start: SessionState, end: SessionState
) -> None:
    session = Session()
    session._state = start
    moves: list[tuple[SessionState, SessionState]] = []
    session.add_state_listener(lambda *move: moves.append(move))
    assert session._move(end) == may_move(start, end)
    assert session.state is (end if may_move(start, end) else start)
    assert moves == ([(start, end)] if may_move(start, end) else [])
    session._state = S.TERMINATED  # its idle timer, if any, finds nothing to do


async def test_a_state_listener_that_fails_stops_neither_the_move_nor_the_others() -> None:
    session = Session()
    seen: list[SessionState] = []

    def fail(_old: SessionState, _new: SessionState) -> None:
        raise ValueError

    session.add_state_listener(fail)
    session.add_state_listener(lambda _old, new: seen.append(new))
    assert session._move(S.TERMINATED)
    assert seen == [S.TERMINATED]


async def test_a_session_that_never_started_is_terminated_at_once_and_stays_so() -> None:
    session = Session()
    for _ in range(2):
        await session.shutdown()
        await session.terminate()
    assert session.state is S.TERMINATED
    assert not session.is_alive
    with pytest.raises(SessionStateError, match=r"start\(\) .* terminated; use restart\(\)"):
        await session.start()
    assert session.state is S.TERMINATED


async def test_a_session_without_a_child_refuses_work_and_advises_what_to_do() -> None:
    session = Session()
    for hint in (r"start\(\)", r"restart\(\)"):
        for call in (
            session.run("1"),
            session.namespace_summary(),
            session.checkpoint(),
            session.stack(),
        ):
            with pytest.raises(SessionStateError, match=hint):
                await call
        assert await session.cancel("nothing") == "not_running"
        assert await session.interrupt() == "not_running"
        await session.terminate()


def test_the_info_of_a_new_session_has_all_that_is_known() -> None:
    info = Session(session_id="mine").info
    assert info.session_id == "mine"
    assert info.state is S.CREATING
    assert info.pid is None
    assert info.running == ()
    assert info.metadata == {}
