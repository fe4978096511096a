"""A namespace can be saved and brought back, elsewhere too; what cannot be saved is named."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.errors import InvalidSetting, SessionLost, SnapshotError
from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.sessions import Session, SessionState
from tests.sessions import HANG_S, Watched, child_config, eventually

SAVED = """\
import math, collections
number = 1
shared = [1]
pair = (shared, shared)
class Point(collections.namedtuple('Point', 'x y')):
    unit = 'm'
def area(p): return p.x * p.y * factor
factor = 2
place = Point(3, 4)
"""
NAMES = ("Point", "area", "collections", "factor", "math", "number", "pair", "place", "shared")


async def saved(source: str) -> SavedNamespace:
    async with Session() as session:
        await session.run(source)
        return await session.checkpoint(timeout_s=HANG_S)


async def names_in(session: Session) -> list[str]:
    done = await session.run("sorted(n for n in globals() if not n.startswith('__') and n != '_')")
    names: list[str] = done.value
    return names


async def test_a_namespace_comes_back_in_another_child(session: Session) -> None:
    checkpoint = await saved(SAVED)
    assert checkpoint.saved == NAMES
    assert checkpoint.skipped == {}
    assert isinstance(checkpoint.data, bytes)
    restored = await session.restore(checkpoint)
    assert (restored.names, restored.lost, restored.differences) == (NAMES, {}, {})
    done = await session.run(
        "(number, area(place), place.unit, math.floor(2.5), type(place) is Point)"
    )
    assert done.value == (1, 24, "m", 2, True)


async def test_bytes_alone_are_enough_and_a_restart_is_survived(session: Session) -> None:
    await session.run("x = 1")
    data = (await session.checkpoint()).data
    await session.restart()
    assert await names_in(session) == []
    assert (await session.restore(data)).names == ("x",)
    assert (await session.run("x")).value == 1


async def test_objects_that_were_shared_stay_shared(session: Session) -> None:
    await session.restore(await saved(SAVED))
    assert (await session.run("pair[0] is pair[1] is shared")).value is True


async def test_restored_functions_see_later_globals(session: Session) -> None:
    await session.restore(await saved(SAVED))
    assert (await session.run("factor = 10\narea(place)")).value == 120
    assert (
        await session.run("def grow():\n    global number\n    number += 1\ngrow(); number")
    ).value == 2
    await session.restore(await saved("def grow():\n    global number\n    number += 100\n"))
    assert (await session.run("grow(); number")).value == 102


async def test_merge_keeps_other_names_and_replace_drops_them(session: Session) -> None:
    checkpoint = await saved("x = 'saved'")
    await session.run("x = 'mine'; y = 'kept'")
    await session.restore(checkpoint, "merge")
    assert await names_in(session) == ["x", "y"]
    await session.run("x = 'mine'")
    await session.restore(checkpoint, "replace")
    assert await names_in(session) == ["x"]
    assert (await session.run("(x, __name__)")).value == ("saved", "__main__")


async def test_values_that_cannot_be_saved_are_named_and_the_rest_is_saved(
    session: Session,
) -> None:
    await session.run(
        "import threading\n"
        "good = 1\n"
        "lock = threading.Lock()\n"
        "generator = (i for i in ())\n"
        "class Stubborn:\n"
        "    def __reduce__(self): raise ValueError('my state is secret \\ud800')\n"
        "stubborn = Stubborn()\n"
        "class Mute(Exception):\n"
        "    def __str__(self): raise Mute\n"
        "class Silent:\n"
        "    def __reduce__(self): raise Mute\n"
        "silent = Silent()\n"
        "globals()['odd \\ud800'] = threading.Lock()\n"
        "globals()[5] = 'no name'\n"
        "def f(): return good\n"
    )
    checkpoint = await session.checkpoint()
    assert set(checkpoint.skipped) == {"lock", "generator", "stubborn", "silent", "odd \\ud800"}
    assert "lock" in checkpoint.skipped["lock"]
    assert "my state is secret" in checkpoint.skipped["stubborn"]
    assert {"good", "f", "Stubborn"} <= set(checkpoint.saved)
    await session.restart()
    await session.restore(checkpoint)
    assert (await session.run("f()")).value == 1


async def test_an_empty_namespace_can_be_saved(session: Session) -> None:
    checkpoint = await session.checkpoint()
    assert checkpoint.saved == ()
    await session.run("x = 1")
    await session.restore(checkpoint, "replace")
    assert await names_in(session) == []


STOPS = """\
def stop(): raise KeyboardInterrupt('stopped')
class Stops:
    def __reduce__(self): return (stop, ())
a = 1
stops = Stops()
"""


@pytest.mark.parametrize("mode", ["merge", "replace"])
@pytest.mark.parametrize("fault", ["garbage", "truncated", "empty", "foreign", "index", "stopped"])
async def test_a_restore_that_fails_leaves_the_namespace_as_it_was(
    session: Session, fault: str, mode: str
) -> None:
    checkpoint = await saved(STOPS)
    data = {
        "garbage": b"\x00garbage" * 100,
        "truncated": checkpoint.data[: len(checkpoint.data) // 2],
        "empty": b"",
        "foreign": b"\x80\x04K\x01.",
        "index": checkpoint.data[:-12] + b"\xff\xff\xff\xff" + checkpoint.data[-8:],
        "stopped": checkpoint.data,
    }[fault]
    await session.run("a = 'mine'; b = a")
    with pytest.raises(SnapshotError, match="not restored"):
        await session.restore(data, mode)  # type: ignore[arg-type]
    assert session.state is SessionState.READY
    assert await names_in(session) == ["a", "b"]
    assert (await session.run("(a, b, __name__)")).value == ("mine", "mine", "__main__")


async def test_wrong_arguments_are_the_callers_error(session: Session) -> None:
    with pytest.raises(TypeError, match="must be bytes, or a list of bytes, not str"):
        await session.restore("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode must be one of 'merge', 'replace', not 'other'"):
        await session.restore(b"", "other")  # type: ignore[arg-type]
    assert (await session.run("1")).value == 1


async def test_a_checkpoint_while_code_runs_is_refused(session: Session) -> None:
    watched = Watched(session, "print('busy', flush=True)\nimport time; time.sleep(3600)")
    await watched.until_output("busy")
    with pytest.raises(SnapshotError, match=f"{watched.execution_id} is running"):
        await session.checkpoint()
    with pytest.raises(SnapshotError, match=f"{watched.execution_id} is running"):
        await session.restore(b"")
    await session.cancel(watched.execution_id)
    await watched.ended()
    assert (await session.checkpoint()).saved


async def test_pickling_leaves_control_free_and_can_be_given_up(session: Session) -> None:
    """The `__reduce__` sleeps on the main thread; questions are answered, and a timeout ends it."""
    await session.run(
        "import time\n"
        "begun = 0\n"
        "class Slow:\n"
        "    def __reduce__(self):\n"
        "        globals()['begun'] += 1\n"
        "        time.sleep(3600)\n"
        "slow = Slow()"
    )
    saving = asyncio.ensure_future(session.checkpoint(timeout_s=None))
    summary = await session.namespace_summary(timeout_s=HANG_S)
    assert "slow" in [entry.name for entry in summary.entries]

    async def is_pickling() -> bool:
        return "__reduce__" in await session.stack()

    async with asyncio.timeout(HANG_S):
        while not await is_pickling():
            pass
    assert not saving.done()
    saving.cancel()
    await asyncio.wait({saving})
    assert (await session.run("begun", on_busy="wait")).value >= 1


async def test_a_checkpoint_that_takes_too_long_is_stopped_and_the_session_goes_on(
    session: Session,
) -> None:
    await session.run(
        "import time\nclass Slow:\n    def __reduce__(self): time.sleep(3600)\nslow = Slow()"
    )
    with pytest.raises(TimeoutError):
        await session.checkpoint(timeout_s=0.1)
    assert (await session.run("'free'", on_busy="wait")).value == "free"


async def test_a_namespace_larger_than_a_frame_passes_in_pieces() -> None:
    async with Session(child_config(max_frame_bytes=512 * 1024)) as session:
        await session.run("big = b'x' * 2_000_000; text = 'é' * 300_000; small = 1")
        checkpoint = await session.checkpoint()
        assert {len(piece) for piece in checkpoint.pieces[:-1]} == {256 * 1024}
        await session.restart()
        for data in (checkpoint, checkpoint.data, list(checkpoint.pieces)):
            assert (await session.restore(data, "replace")).names == ("big", "small", "text")
            done = await session.run("(len(big), set(big), set(text), small)")
            assert done.value == (2_000_000, {120}, {"é"}, 1)


async def test_100_megabytes_pass_while_control_is_answered_and_the_child_makes_no_copy(
    session: Session,
) -> None:
    await session.run("big = bytearray(100_000_000); big[-1] = 7; small = 1")
    peak = "import resource\nresource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    before_kib = (await session.run(peak)).value
    saving = asyncio.ensure_future(session.checkpoint(timeout_s=None))
    answered = 0
    while not saving.done():
        summary = await session.namespace_summary(timeout_s=HANG_S)
        assert "big" in [entry.name for entry in summary.entries]
        answered += 1
    assert answered > 3
    checkpoint = await saving
    assert checkpoint.size > 100_000_000
    grown_kib = (await session.run(peak)).value - before_kib
    assert grown_kib < 30_000
    await session.restart()
    restoring = asyncio.ensure_future(session.restore(checkpoint, timeout_s=None))
    while not restoring.done():
        await session.namespace_summary(timeout_s=HANG_S)
    assert {"big", "small"} <= set((await restoring).names)
    assert (await session.run("(len(big), big[-1], small)")).value == (100_000_000, 7, 1)


async def test_a_namespace_over_the_limit_is_an_error_and_the_session_lives(
    session: Session,
) -> None:
    await session.run("big = b'x' * 2_000_000; small = 1; more = b'y' * 3_000_000")
    with pytest.raises(SnapshotError, match=r"'more', 'big' 20000.. bytes, 'small' .. bytes"):
        await session.checkpoint(max_bytes=4_000_000)
    with pytest.raises(InvalidSetting, match="max_bytes = 0"):
        await session.checkpoint(max_bytes=0)
    await session.run("del more")
    assert (await session.checkpoint(max_bytes=4_000_000)).saved == ("big", "small")


async def test_a_namespace_that_is_saved_again_without_a_name_arrives_once(
    session: Session,
) -> None:
    await session.run(
        "import threading\nbig = b'x' * 3_000_000\nlock = threading.Lock()\nlast = 'end'"
    )
    checkpoint = await session.checkpoint()
    assert set(checkpoint.skipped) == {"lock"}
    assert checkpoint.size < 3_100_000
    await session.restore(checkpoint, "replace")
    assert (await session.run("(len(big), last)")).value == (3_000_000, "end")


async def test_pieces_that_were_given_up_are_not_restored(session: Session) -> None:
    checkpoint = await saved("a = b'a' * 5_000_000")
    await session.run("b = 1")
    restoring = asyncio.ensure_future(session.restore(checkpoint))
    await asyncio.sleep(0)  # the first pieces are sent
    restoring.cancel()
    await asyncio.wait({restoring})
    assert (await session.restore(await saved("c = 3"))).names == ("c",)
    assert await names_in(session) in (["b", "c"], ["a", "b", "c"])


async def test_restores_at_once_do_not_mix_their_pieces(session: Session) -> None:
    checkpoints = [await saved(f"x{n} = b'{n}' * 3_000_000") for n in range(3)]
    restored = await asyncio.gather(*(session.restore(each) for each in checkpoints))
    assert [each.names for each in restored] == [("x0",), ("x1",), ("x2",)]
    done = await session.run("[set(x) for x in (x0, x1, x2)]")
    assert done.value == [{48}, {49}, {50}]


async def test_output_of_pickling_belongs_to_the_session(session: Session) -> None:
    await session.run(
        "class Chatty:\n"
        "    def __reduce__(self):\n"
        "        print('while saving')\n"
        "        return (int, ())\n"
        "chatty = Chatty()"
    )
    await session.checkpoint()
    message = await session.receive_message(timeout_s=HANG_S)
    assert (message.execution_id, message.data) == (None, "while saving\n")
    assert (await session.run("1")).stdout == ""


async def test_a_checkpoint_ends_when_the_child_dies(session: Session) -> None:
    await session.run(
        "import os\nclass Deadly:\n    def __reduce__(self): os._exit(5)\ndeadly = Deadly()"
    )
    with pytest.raises(SessionLost, match="exited with status 5"):
        await session.checkpoint()
    assert session.state is SessionState.ERROR


async def test_saving_and_restoring_count_as_no_execution(session: Session) -> None:
    await session.restore(await session.checkpoint())
    assert session.info.execution_count == 0
    await eventually(lambda: session.state in (SessionState.READY, SessionState.IDLE))
