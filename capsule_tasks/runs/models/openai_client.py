"""The official client of OpenAI-compatible servers (extra `openai`), and its errors as ours.

Replies are read as the plain JSON that the server sent. So fields that the installed client does
not know come through, and no time is spent on models that would be turned back into JSON.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from capsule_tasks.errors import InvalidSetting, ModelFailed
from capsule_tasks.runs.models.model import ModelRequest, OutputSchema, ToolSpec
from capsule_tasks.runs.records import Spent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai import AsyncOpenAI

    _Lifetime = AsyncGenerator[AsyncOpenAI, None]

_RETRYABLE_CODES = frozenset({"server_error", "rate_limit_exceeded", "vector_store_timeout"})
"""Codes of errors within a reply, whose HTTP status says nothing."""

Call = Callable[..., Awaitable[Any]]
"""A method of the client that gives the raw response."""


class OpenAIClients:
    """A client of one server for each event loop that asks, as connections belong to a loop.

    A loop that ends closes its client, as `asyncio.run` does. A client that is given stays open,
    and serves all loops. Retries of the client itself are off: `calling` makes them, and tells
    those who watch a stream.
    """

    def __init__(
        self,
        client: AsyncOpenAI | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Without `base_url` and `api_key` the client reads OPENAI_BASE_URL and OPENAI_API_KEY."""
        if client is not None and (base_url or api_key):
            must = "None beside a client, which has its own"
            raise InvalidSetting("base_url or api_key", base_url or "***", must)
        self._given = client.with_options(max_retries=0) if client is not None else None
        self._options: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
        self._of_loops: dict[asyncio.AbstractEventLoop, tuple[AsyncOpenAI, _Lifetime]] = {}

    async def current(self) -> AsyncOpenAI:
        """The client of the running event loop; it is made when it is first asked for."""
        if self._given is not None:
            return self._given
        loop = asyncio.get_running_loop()
        if loop not in self._of_loops:
            lifetime = self._opened(loop)
            self._of_loops[loop] = await anext(lifetime), lifetime
        return self._of_loops[loop][0]

    async def _opened(self, loop: asyncio.AbstractEventLoop) -> _Lifetime:
        # An event loop closes its async generators when it shuts down. Nothing else would tell us:
        # the connections of a client that is freed later could not be closed any more.
        try:
            async with _client_class()(max_retries=0, **self._options) as client:
                yield client
        finally:
            self._of_loops.pop(loop, None)

    async def aclose(self) -> None:
        """Close the client that was made for the running event loop; another call makes a new one.

        A client that was given stays open.
        """
        if (opened := self._of_loops.get(asyncio.get_running_loop())) is not None:
            await opened[1].aclose()


class OpenAIModel:
    """A model of a server, and its client."""

    def __init__(
        self,
        name: str,
        *,
        client: AsyncOpenAI | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        clients: OpenAIClients | None = None,
    ) -> None:
        """Without a client one is made for each event loop, from `base_url` and `api_key` or the
        environment. `clients` are shared with other models of the server.
        """
        self.name = name
        self._clients = clients or OpenAIClients(client, base_url=base_url, api_key=api_key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    async def aclose(self) -> None:
        """Close the client that was made for the running event loop; one that was given stays."""
        await self._clients.aclose()


def _client_class() -> type[AsyncOpenAI]:
    try:
        from openai import AsyncOpenAI  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        text = "models of OpenAI-compatible servers need: pip install 'capsule-tasks[openai]'"
        raise ImportError(text) from error
    return AsyncOpenAI


# --- arguments that both APIs have ---------------------------------------------------------------


def completed_arguments(
    arguments: dict[str, Any],
    request: ModelRequest,
    tools: list[dict[str, Any]],
    chosen: Callable[[ToolSpec], dict[str, Any]],
) -> dict[str, Any]:
    """The arguments with those about tools, and with those of `ModelSettings.extra`.

    `tools` are as the API wants them, and so is a `chosen` one. `extra` may repeat no argument.
    """
    settings = request.settings
    if request.tools:
        arguments["tools"] = tools
        if (choice := settings.tool_choice) is not None:
            is_word = choice in {"auto", "required", "none"}
            arguments["tool_choice"] = choice if is_word else chosen(_tool_named(choice, request))
        if settings.parallel_tool_calls is not None:
            arguments["parallel_tool_calls"] = settings.parallel_tool_calls
    extra = settings.extra or {}
    if repeated := [name for name in extra if name in arguments or name == "stream"]:
        must = f"without {repeated[0]!r}, which the run itself sets"
        raise InvalidSetting("ModelSettings.extra", extra, must)
    return arguments | extra


def _tool_named(choice: str, request: ModelRequest) -> ToolSpec:
    for tool in request.tools:
        if choice in {tool.name, f"{tool.namespace}.{tool.name}"}:
            return tool
    names = ", ".join(repr(tool.name) for tool in request.tools)
    must = f"'auto', 'required', 'none', or the name of a tool that the model is told of: {names}"
    raise InvalidSetting("ModelSettings.tool_choice", choice, must)


def function_of(tool: ToolSpec) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {name: getattr(tool, name) for name in names}


def format_of(schema: OutputSchema) -> dict[str, Any]:
    return {"name": schema.name, "schema": schema.parameters, "strict": schema.strict}


# --- one call ----------------------------------------------------------------------------------


async def whole_reply(
    model: str, call: Call, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """The reply to a call in one piece, and the server's id of the request."""
    with translated_errors(model):
        response = await call(**arguments)
        try:
            reply = msgspec.json.decode(response.content)
        except msgspec.DecodeError as error:
            why = f"its reply is no JSON ({error}): {response.text[:100]!r}"
            raise ModelFailed(model, why) from error
    if not isinstance(reply, dict):
        raise ModelFailed(model, f"its reply is no object: {response.text[:100]!r}")
    return reply, response.request_id


async def streamed_reply(
    model: str, call: Call, arguments: Mapping[str, Any]
) -> AsyncGenerator[tuple[dict[str, Any], str | None], None]:
    """The events of a streamed reply, each with the server's id of the request."""
    from openai import AsyncStream  # noqa: PLC0415 - the client is there

    with translated_errors(model):
        response = await call(**arguments, stream=True)
        async with response.parse(to=AsyncStream[object]) as stream:
            async for event in stream:
                yield event, response.request_id


def spent_of(usage: dict[str, Any] | None, inputs: str, outputs: str) -> Spent:
    """The usage of a reply, whose API has this name for tokens of the input and of the output."""
    usage = usage or {}
    of_input = usage.get(f"{inputs}_details") or {}
    of_output = usage.get(f"{outputs}_details") or {}
    return Spent(
        requests=1,
        input_tokens=usage.get(inputs) or 0,
        cached_tokens=of_input.get("cached_tokens") or 0,
        cache_write_tokens=of_input.get("cache_write_tokens") or 0,
        output_tokens=usage.get(outputs) or 0,
        reasoning_tokens=of_output.get("reasoning_tokens") or 0,
    )


# --- errors ------------------------------------------------------------------------------------


@contextmanager
def translated_errors(model: str) -> Iterator[None]:
    """Raise errors of the client, and of the connection, as ModelFailed."""
    import openai  # noqa: PLC0415 - the client is there

    try:
        yield
    except openai.APIStatusError as error:
        headers = error.response.headers
        raise ModelFailed(
            model,
            f"HTTP {error.status_code}: {error.message}",
            is_retryable=is_retryable(error.status_code, error.code, headers),
            retry_after_s=retry_after_s(headers),
            status=error.status_code,
        ) from error
    except openai.APIConnectionError as error:
        cause = error.__cause__
        why = f"{error.message} ({type(cause).__name__}: {cause})" if cause else error.message
        raise ModelFailed(model, why, is_retryable=True) from error
    except openai.APIError as error:  # an event of a stream
        raise failure_of_reply(model, error.code, error.message) from error
    except ValueError as error:  # a stream that is no JSON
        raise ModelFailed(model, f"its reply cannot be read: {error}") from error


def failure_of_reply(model: str, code: str | None, message: str | None) -> ModelFailed:
    """The failure that a server reports within its reply."""
    why = ": ".join(part for part in (code, message) if part) or "its server gave no reason"
    return ModelFailed(model, why, is_retryable=code in _RETRYABLE_CODES)


def is_retryable(status: int, code: str | None, headers: Mapping[str, str]) -> bool:
    """Whether a call that was refused may succeed when it is made again."""
    asked = headers.get("x-should-retry")
    if asked in {"true", "false"}:
        return asked == "true"
    if code == "insufficient_quota":  # also a 429, but nothing changes until somebody pays
        return False
    return status in {408, 409, 429} or status >= 500


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The pause that a server asks for: milliseconds, seconds, or a date."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            pause_s = float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
        return max(pause_s, 0.0) if math.isfinite(pause_s) else None
    date = email.utils.parsedate_tz(headers.get("retry-after", ""))
    return max(email.utils.mktime_tz(date) - time.time(), 0.0) if date else None
