"""Items of a conversation as a client may create them on the server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from capsule_tasks.runs.records import Item

_MAX_ID_CHARS = 32
"""The server refuses longer ids from a client. Those of Responses are longer."""


def client_item(item: Item) -> Item | None:
    """The item as the server takes it; None if a client cannot create such an item.

    An `id` that the server would refuse is left out.
    """
    match item.get("type", "message"):
        case "message":
            made = _message(item)
        case "function_call":
            namespace = item.get("namespace")
            name = f"{namespace}__{item['name']}" if namespace else item["name"]
            made = {"name": name, "arguments": item.get("arguments") or "{}"}
        case "function_call_output":
            made = {"output": _text_of(item.get("output"))}
        case _:  # reasoning, and calls of tools that another server ran
            return None
    if made is None:
        return None
    made["type"] = item.get("type", "message")
    if "call_id" in item:
        made["call_id"] = client_call_id(item["call_id"])
    if len(item.get("id") or "") in range(1, _MAX_ID_CHARS + 1):
        made["id"] = item["id"]
    return made


def client_call_id(call_id: str) -> str:
    """The id of a call, or a short one in place of one that the server would refuse."""
    if len(call_id) <= _MAX_ID_CHARS:
        return call_id
    return f"call_{hashlib.sha256(call_id.encode()).hexdigest()[:24]}"


def _message(item: Item) -> Item | None:
    role = {"developer": "system"}.get(item["role"], item["role"])
    content = item.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kind = "output_text" if role == "assistant" else "input_text"
    made = [_image(part) or _text_part(kind, part) for part in parts]
    if role != "user":  # only a user shows images
        made = [part for part in made if part is not None and part["type"] == kind]
    given = [part for part in made if part is not None]
    return {"role": role, "content": given} if given else None


def _text_part(kind: str, part: Mapping[str, Any]) -> dict[str, Any] | None:
    text = part.get("text") or part.get("transcript") or part.get("refusal")
    return {"type": kind, "text": text} if isinstance(text, str) else None


def _image(part: Mapping[str, Any]) -> dict[str, Any] | None:
    if part.get("type") != "input_image" or not part.get("image_url"):
        return None
    names = ("type", "image_url", "detail")
    return {name: part[name] for name in names if part.get(name) is not None}


def _text_of(output: Any) -> str:
    if isinstance(output, str):
        return output
    parts = output if isinstance(output, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if texts and all(isinstance(text, str) for text in texts):
        return "\n".join(str(text) for text in texts)
    return msgspec.json.encode(output).decode()
