"""Items of a conversation as a client may create them on the server."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from capsule_tasks.runs.records import Item

_MAX_ID_CHARS = 32
"""The server refuses longer ids from a client. Those of Responses are longer."""


def client_item(item: Item) -> Item | None:
    """The item as the server takes it; None if a client cannot create such an item.

    An `id` that the server would refuse is left out.
    """
    kind = item.get("type", "message")
    match kind:
        case "message":
            made = _message(item)
        case "function_call":
            namespace = item.get("namespace")
            name = f"{namespace}__{item['name']}" if namespace else item["name"]
            made = {"name": name, "arguments": item.get("arguments") or "{}"}
        case "function_call_output":
            made = {"output": _text_of(item.get("output"))}
        case _:  # reasoning, and calls of tools that another server ran
            made = None
    if made is None:
        return None
    made["type"] = kind
    if "call_id" in item:
        made["call_id"] = _client_call_id(item["call_id"])
    if len(item.get("id") or "") in range(1, _MAX_ID_CHARS + 1):
        made["id"] = item["id"]
    return made


def _client_call_id(call_id: str) -> str:
    """The id of a call, or a short one in place of one that the server would refuse."""
    if len(call_id) <= _MAX_ID_CHARS:
        return call_id
    return f"call_{hashlib.sha256(call_id.encode()).hexdigest()[:24]}"


def _message(item: Item) -> Item | None:
    role = "system" if item["role"] == "developer" else item["role"]
    content = item.get("content") or []
    parts: list[Item] = []
    for part in [{"text": content}] if isinstance(content, str) else content:
        text = part.get("text") or part.get("transcript") or part.get("refusal")
        if isinstance(text, str):
            kind = "output_text" if role == "assistant" else "input_text"
            parts.append({"type": kind, "text": text})
        elif role == "user" and part.get("type") == "input_image" and part.get("image_url"):
            names = ("type", "image_url", "detail")
            parts.append({name: part[name] for name in names if part.get(name) is not None})
    return {"role": role, "content": parts} if parts else None


def _text_of(output: Any) -> str:
    if isinstance(output, str):
        return output
    parts = output if isinstance(output, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if texts and all(isinstance(text, str) for text in texts):
        return "\n".join(str(text) for text in texts)
    return msgspec.json.encode(output).decode()
