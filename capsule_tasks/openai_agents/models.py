"""Models whose replies are journaled, so that a crash repeats no model call that was finished."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from hashlib import sha256
from typing import Any

import msgspec
from agents import Model, ModelProvider, ModelResponse
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseOutputItemDoneEvent,
)
from pydantic import TypeAdapter

from capsule_tasks.openai_agents.current import CurrentTurn, current_turn

_replies: TypeAdapter[ModelResponse] = TypeAdapter(ModelResponse)


class JournaledModel(Model):
    """A model that looks into the journal first, in a durable run; else the model itself."""

    def __init__(self, inner: Model) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # asked for by `copy`, of a model half made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __eq__(self, other: object) -> bool:
        """Agents that share a model are as equal as they were."""
        return isinstance(other, JournaledModel) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(self.inner)

    async def _cleanup_on_run_end(self, owner: object) -> None:
        await self.inner._cleanup_on_run_end(owner)

    async def close(self) -> None:
        await self.inner.close()

    def get_retry_advice(self, request: Any) -> Any:
        return self.inner.get_retry_advice(request)

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        turn = current_turn()
        if turn is None:
            return await self.inner.get_response(*args, **kwargs)
        call = turn.ledger.model_call("/".join(turn.path), _digest(args, kwargs))
        if call.reply is not None:
            return _replies.validate_json(call.reply)
        try:
            response = await self.inner.get_response(*args, **kwargs)
        except Exception as error:
            turn.causes.of_models.append(error)
            raise
        await call.record(_replies.dump_json(response, exclude_unset=True, warnings=False))
        return response

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        turn = current_turn()
        if turn is None:
            stream: Any = self.inner.stream_response(*args, **kwargs)
        else:
            stream = _journaled_stream(turn, self.inner, args, kwargs)
        async with _closing(stream):
            async for event in stream:
                yield event


async def _journaled_stream(
    turn: CurrentTurn, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AsyncIterator[Any]:
    """The events of a call; its completed event comes after the reply has been journaled.

    A reply from the journal comes as two events: created, and completed.
    """
    call = turn.ledger.model_call("/".join(turn.path), _digest(args, kwargs))
    if call.reply is not None:
        response = _restored(call.reply)
        yield ResponseCreatedEvent(response=response, sequence_number=0, type="response.created")
        yield ResponseCompletedEvent(
            response=response, sequence_number=1, type="response.completed"
        )
        return
    done: list[Any] = []
    stream: Any = model.stream_response(*args, **kwargs)
    try:
        async with _closing(stream):
            async for event in stream:
                if isinstance(event, ResponseOutputItemDoneEvent):
                    done.append(event.item)
                if isinstance(event, ResponseCompletedEvent):
                    # Some servers send the items in events of their own only.
                    event.response.output = event.response.output or done
                    await call.record(_stored(event.response))
                yield event
    except Exception as error:
        turn.causes.of_models.append(error)
        raise


def _closing(stream: Any) -> AbstractAsyncContextManager[Any]:
    """Close a stream that is left early: a generator of the user's may hold a connection."""
    return aclosing(stream) if hasattr(stream, "aclose") else nullcontext()


_REPEATED: dict[str, Any] = {"instructions": None, "tools": []}
"""Fields in which a response repeats its request, which may be long: they are not journaled."""


def _stored(response: Response) -> bytes:
    """A reply with the marks that the SDK sets on it: the request's id, and what it counts."""
    data = response.model_dump(
        mode="json", exclude=set(_REPEATED), exclude_unset=True, warnings=False
    )
    marks = {name: value for name, value in vars(response).items() if name.startswith("_")}
    return msgspec.json.encode([data, marks], enc_hook=_plain)


def _restored(reply: bytes) -> Response:
    data, marks = msgspec.json.decode(reply)
    response = Response.construct(**data, **_REPEATED)
    for name, value in marks.items():
        object.__setattr__(response, name, value)
    return response


_NAMES = (
    *("system_instructions", "input", "model_settings", "tools", "output_schema", "handoffs"),
    *("tracing", "previous_response_id", "conversation_id", "prompt"),
)


def _digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A digest of what the model is asked: another question must not get an old reply.

    Settings of the model are not a part of it: they say how, not what, and some are made anew in
    each process.
    """
    asked = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    schema = asked.get("output_schema")
    question = [
        asked.get("system_instructions"),
        asked.get("input"),
        sorted(str(getattr(tool, "name", "")) for tool in asked.get("tools") or ()),
        schema.name() if schema is not None else None,
        sorted(handoff.tool_name for handoff in asked.get("handoffs") or ()),
        asked.get("previous_response_id"),
        asked.get("conversation_id"),
        asked.get("prompt"),
    ]
    spelled = msgspec.json.encode(question, enc_hook=_plain, order="deterministic")
    return sha256(spelled).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    return str(value)


class JournalingProvider(ModelProvider):
    """The models of another provider, journaled; it outlives the turns and is closed by nobody."""

    def __init__(self, inner: ModelProvider) -> None:
        self.inner = inner

    def get_model(self, model_name: str | None) -> Model:
        return journaled(self.inner.get_model(model_name))

    async def aclose(self) -> None:
        await self.inner.aclose()


def journaled(model: Model) -> Model:
    return model if isinstance(model, JournaledModel) else JournaledModel(model)
