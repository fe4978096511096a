"""The example of the README, as a test."""

from capsule_tasks import Session
from capsule_tasks.protocol.messages import Ack, Output, Result
from tests.sessions import collect, text


async def test_an_execution_is_acknowledged_then_speaks_then_ends(session: Session) -> None:
    messages = await collect(session, "x = 20 + 1\nprint('hi')\nx * 2")
    ack, *said, result = messages
    assert isinstance(ack, Ack)
    assert all(isinstance(message, Output) for message in said)
    assert text(said) == "hi\n"
    assert isinstance(result, Result)
    assert result.value == 42
