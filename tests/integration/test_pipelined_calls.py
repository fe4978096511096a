"""Many calls over one connection: what each is answered, whichever way it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import redis

from capsule_tasks.errors import StorageClosed, StorageError, StorageUnavailable, StorageUnusable
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.store import execution_record
from capsule_tasks.storage.keys import ExecutionKeys
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call, Code
from tests.servers import fresh_prefix
from tests.sessions import HANG_S

ApprovalRequest = Callable[[Call], asyncio.Future[Reply | StorageError]]


@pytest.fixture
async def connection(valkey_url: str) -> AsyncIterator[PipelinedConnection]:
    connection = PipelinedConnection(valkey_url)
    await connection.run(look(fresh_prefix()))
    yield connection
    await connection.close()


@pytest.fixture(params=["run", "cast"])
def ask(connection: PipelinedConnection, request: pytest.FixtureRequest) -> ApprovalRequest:
    """Make a call, and have its reply or its error."""

    def by_run(call: Call) -> asyncio.Future[Reply | StorageError]:
        async def reply_or_error() -> Reply | StorageError:
            try:
                return await connection.run(call)
            except StorageError as error:
                return error

        return asyncio.ensure_future(reply_or_error())

    def by_cast(call: Call) -> asyncio.Future[Reply | StorageError]:
        answered: asyncio.Future[Reply | StorageError] = asyncio.Future()
        connection.send_nowait(call, answered.set_result)
        return answered

    return by_run if request.param == "run" else by_cast


def look(prefix: str) -> Call:
    return execution_record.call(ExecutionKeys("an-id", prefix))


async def test_a_server_that_forgot_the_scripts_is_sent_them(
    ask: ApprovalRequest, valkey_url: str
) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.script_flush()
    async with asyncio.timeout(HANG_S):
        replies = await asyncio.gather(*(ask(look(fresh_prefix())) for _ in range(3)))
    assert replies == [[Code.MISSING]] * 3


async def test_an_error_of_a_script_is_raised_with_its_cause(
    ask: ApprovalRequest, valkey_url: str
) -> None:
    prefix = fresh_prefix()
    with redis.Redis.from_url(valkey_url) as client:
        client.set(ExecutionKeys("an-id", prefix).meta, "no hash", ex=60)
    async with asyncio.timeout(HANG_S):
        error, reply = await asyncio.gather(ask(look(prefix)), ask(look(fresh_prefix())))
    assert isinstance(error, StorageUnusable)
    assert isinstance(error.__cause__, redis.ResponseError)
    assert not error.may_have_written
    assert reply == [Code.MISSING]


async def test_calls_in_flight_fail_when_the_connection_is_closed(
    connection: PipelinedConnection,
) -> None:
    answer: asyncio.Future[Reply | StorageError] = asyncio.Future()
    asked = asyncio.ensure_future(connection.run(look(fresh_prefix())))
    connection.send_nowait(look(fresh_prefix()), answer.set_result)
    await asyncio.sleep(0)
    await connection.close()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(StorageClosed):
            await asked
        error = await answer
    assert isinstance(error, StorageUnavailable)
    assert error.may_have_written


async def test_a_caller_that_leaves_disturbs_no_other_call(connection: PipelinedConnection) -> None:
    leaver = asyncio.ensure_future(connection.run(look(fresh_prefix())))
    await asyncio.sleep(0)
    leaver.cancel()
    async with asyncio.timeout(HANG_S):
        assert await connection.run(look(fresh_prefix())) == [Code.MISSING]
    assert leaver.cancelled()
