"""The example of the README, as a test."""

from capsule_tasks import Session
from capsule_tasks.protocol.messages import Ack, Output, Result
from tests.sessions import collect


async def test_an_execution_is_acknowledged_then_speaks_then_ends(session: Session) -> None:
    messages = await collect(session, "x = 20 + 1\nprint('hi')\nx * 2")
    assert [type(message) for message in messages] == [Ack, Output, Result]
    assert messages[1].data == "hi\n"
    assert messages[2].value == 42
