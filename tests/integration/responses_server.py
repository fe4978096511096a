"""A server on loopback that speaks OpenAI's Responses API, with replies that a test wrote.

It speaks Chat Completions and compacts, too. The official client talks to it. Each connection is a
thread of its own, and the server runs beside the event loop of the test and beside processes that
the test kills.
"""

from __future__ import annotations

import json
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, Literal, Self

from openai import AsyncOpenAI

from tests.integration.models.chat_replies import chunks_of, completion_of

KEY = "sk-stand-in-0123456789abcdef"
MODEL = "stand-in-1"
DELTA = 7
"""Characters of a text, or of arguments, in one delta."""
WAIT_S = 20.0
"""So long a test waits for something that the server has to see."""
_LOOK_EVERY_S = 0.01

BEFORE_HEADERS = -1


@dataclass(frozen=True)
class Reply:
    """The output of a model call, and what goes wrong with it."""

    output: Sequence[Any]
    held_after: int | None = None
    """After so many events the answer waits for `release`, or for the client to go away."""
    cut_after: int | None = None
    """After so many events the connection is dropped; of an answer in one piece, so many bytes."""
    ending: Literal["response.completed", "response.incomplete", "response.failed", "error", ""] = (
        "response.completed"
    )
    """The last event; with "" the stream ends properly without one."""
    has_usage: bool = True
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the response, as other servers have them."""


@dataclass(frozen=True)
class Refusal:
    """An answer with an error."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "not now"
    code: str | None = None


Answer = Reply | Refusal
Script = Callable[[dict[str, Any]], Answer]


@dataclass(frozen=True)
class Request:
    """A model call as the server got it."""

    body: dict[str, Any]
    headers: dict[str, str]
    connection: int
    path: str = ""

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


class ResponsesServer:
    """Answers model calls by a script: answers in their order, or a function of the request."""

    def __init__(self, *answers: Any, script: Script | None = None) -> None:
        """An answer that is a list of items, or one item, stands for a `Reply` of them."""
        self._answers = deque(_answer(each) for each in answers)
        self._script = script
        self._changed = threading.Condition()
        self._releases = 0
        self.requests: list[Request] = []
        self.held = 0
        """Answers that wait, or have waited."""
        self.abandoned = 0
        """Answers whose client went away before their end."""
        self.connections = 0
        self.open_connections = 0
        server = self

        class Handler(_Handler):
            stand_in = server

        self._http = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def client(self, **options: Any) -> AsyncOpenAI:
        """The official client of this server."""
        return AsyncOpenAI(base_url=self.url, **{"api_key": KEY, **options})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._http.drop_connections()
        self._http.server_close()
        self._thread.join()

    def release(self) -> None:
        """Let one held answer go on."""
        with self._changed:
            self._releases += 1
            self._changed.notify_all()

    def add(self, *answers: Any) -> None:
        """Add answers to those that are left."""
        with self._changed:
            self._answers.extend(_answer(each) for each in answers)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a change of the server's counts; an async test calls this in a thread."""
        with self._changed:
            assert self._changed.wait_for(is_so, WAIT_S), vars(self)

    # --- for the handlers ------------------------------------------------------------------------

    def counted(self, **changes: int) -> None:
        with self._changed:
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)
            self._changed.notify_all()

    def answer_to(self, request: Request) -> Answer:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
            if self._script is not None:
                return _answer(self._script(request.body))
            if not self._answers:
                return Refusal(500, {"x-should-retry": "false"}, "the script has no more answers")
            return self._answers.popleft()

    def is_released(self) -> bool:
        """Take a release, if there is one; waits a moment for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._releases, _LOOK_EVERY_S):
                return False
            self._releases -= 1
            return True


def _answer(given: Any) -> Answer:
    if isinstance(given, (Reply, Refusal)):
        return given
    return Reply(given if isinstance(given, list) else [given])


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, *args: Any) -> None:
        self._sockets: set[Any] = set()
        self._numbers = count(1)
        super().__init__(*args)

    def get_request(self) -> Any:
        connection, address = super().get_request()
        self._sockets.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._sockets.discard(request)
        super().shutdown_request(request)

    def drop_connections(self) -> None:
        """End the threads of connections that clients keep open."""
        for connection in list(self._sockets):
            try:
                connection.shutdown(2)
            except OSError:
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away; other errors fail the request that they cut."""


class _Handler(BaseHTTPRequestHandler):
    stand_in: ResponsesServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.stand_in.counted(connections=1, open_connections=1)
        self._number = self.stand_in.connections

    def finish(self) -> None:
        self.stand_in.counted(open_connections=-1)
        super().finish()

    def log_message(self, *args: Any) -> None:
        """Write no log."""

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        body = json.loads(self.rfile.read(length))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.stand_in.answer_to(Request(body, headers, self._number, self.path))
        number = len(self.stand_in.requests)
        try:
            if headers.get("authorization") != f"Bearer {KEY}":
                answer = Refusal(401, message="Incorrect API key provided")
            if isinstance(answer, Refusal):
                self._refuse(answer)
            elif body.get("stream"):
                self._stream(answer, self._response(answer, body, number), number)
            else:
                self._send(answer, self._response(answer, body, number), number)
        except (ConnectionError, _Abandoned):
            self.stand_in.counted(abandoned=1)
            self.close_connection = True

    def _response(self, reply: Reply, body: dict[str, Any], number: int) -> dict[str, Any]:
        if self.path.endswith("/chat/completions"):
            output = [_plain(item) for item in reply.output]
            return {**completion_of(output, reply.ending, body, number), **reply.fields}
        response = response_of(reply, body, number)
        if self.path.endswith("/compact"):
            response["object"] = "response.compaction"
        return response

    def _lines(self, reply: Reply, response: dict[str, Any]) -> Iterator[str]:
        if self.path.endswith("/chat/completions"):
            for chunk in chunks_of(response, reply.ending, DELTA):
                yield f"data: {json.dumps(chunk)}\n\n"
            if reply.ending:
                yield "data: [DONE]\n\n"
            return
        for number, event in enumerate(events_of(reply, response)):
            line = json.dumps({**event, "sequence_number": number})
            yield f"event: {event['type']}\ndata: {line}\n\n"

    def _refuse(self, refusal: Refusal) -> None:
        error = {"message": refusal.message, "type": "error", "code": refusal.code, "param": None}
        self._whole(refusal.status, {"error": error}, refusal.headers)

    def _whole(
        self, status: int, data: Any, headers: dict[str, str], cut: int | None = None
    ) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self._drop()

    def _send(self, reply: Reply, response: dict[str, Any], number: int) -> None:
        if reply.held_after is not None:
            self._hold()
        self._whole(200, response, {"x-request-id": f"req_{number}"}, reply.cut_after)

    def _stream(self, reply: Reply, response: dict[str, Any], number: int) -> None:
        if reply.held_after == BEFORE_HEADERS:
            self._hold()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("x-request-id", f"req_{number}")
        self.end_headers()
        for sent, line in enumerate(self._lines(reply, response)):
            if reply.held_after == sent:
                self._hold()
            if reply.cut_after == sent:
                self._drop()
                return
            self._chunk(line.encode())
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _drop(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(2)
        self.close_connection = True

    def _hold(self) -> None:
        self.stand_in.counted(held=1)
        while not self.stand_in.is_released():
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable:  # a client says nothing within an answer: it has gone away
                raise _Abandoned


class _Abandoned(Exception):
    """The client has closed the connection."""


# --- what a server of the Responses API says -----------------------------------------------------


def response_of(reply: Reply, body: dict[str, Any], number: int) -> dict[str, Any]:
    """The whole response, which repeats what was asked as the real one does."""
    output = [_plain(item) for item in reply.output]
    usage = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1_790_000_000,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": None,
        "model": body.get("model"),
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": [_shown_tool(tool) for tool in body.get("tools", [])],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": usage if reply.has_usage else None,
        "user": None,
        "metadata": {},
        **reply.fields,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name not in {"headers", "authorization"}}


def events_of(reply: Reply, response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed response, in the order of the real ones."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        yield from _events_of_item(index, item)
    match reply.ending:
        case "response.completed":
            yield {"type": reply.ending, "response": response}
        case "response.incomplete":
            why = {"reason": "max_output_tokens"}
            cut = {**response, "status": "incomplete", "incomplete_details": why}
            yield {"type": reply.ending, "response": cut}
        case "response.failed":
            error = {"code": "server_error", "message": "the model broke down"}
            yield {
                "type": reply.ending,
                "response": {**begun, "status": "failed", "error": error},
            }
        case "error":
            yield {"type": "error", "code": "server_error", "message": "broken", "param": None}


def _events_of_item(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    where = {"output_index": index, "item_id": item.get("id", "")}
    begun = {**item, "status": "in_progress"} if "status" in item else dict(item)
    match item["type"]:
        case "message":
            begun["content"] = []
            inner = _events_of_message(where, item)
        case "function_call":
            begun["arguments"] = ""
            inner = _events_of_arguments(where, item["arguments"])
        case "web_search_call":
            kinds = ("in_progress", "searching", "completed")
            inner = iter([{"type": f"response.web_search_call.{kind}", **where} for kind in kinds])
        case _:
            inner = iter([])
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield from inner
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _events_of_message(where: dict[str, Any], item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(item["content"]):
        at = {**where, "content_index": number}
        field_name = "refusal" if part["type"] == "refusal" else "text"
        kind = "response.refusal" if part["type"] == "refusal" else "response.output_text"
        scores = {} if part["type"] == "refusal" else {"logprobs": []}
        whole = part[field_name]
        yield {"type": "response.content_part.added", **at, "part": {**part, field_name: ""}}
        for delta in _deltas(whole):
            yield {"type": f"{kind}.delta", **at, "delta": delta, **scores}
        yield {"type": f"{kind}.done", **at, field_name: whole, **scores}
        yield {"type": "response.content_part.done", **at, "part": part}


def _events_of_arguments(where: dict[str, Any], arguments: str) -> Iterator[dict[str, Any]]:
    for delta in _deltas(arguments):
        yield {"type": "response.function_call_arguments.delta", **where, "delta": delta}
    yield {"type": "response.function_call_arguments.done", **where, "arguments": arguments}


def _deltas(text: str) -> list[str]:
    size = max(DELTA, len(text) // 100)
    return [text[start : start + size] for start in range(0, len(text), size)]


def _plain(item: Any) -> dict[str, Any]:
    data = dict(item) if isinstance(item, dict) else item.model_dump(mode="json", exclude_none=True)
    if data.get("type") == "function_call":
        data = {"status": "completed", "id": f"fc_{data['call_id']}", **data}
    return data
