"""A model that needs neither a network nor a key: it follows one rule.

It looks the order of the last question up, pays it back, and says how that went. With the key of a
provider in the environment, the examples use a real model.
"""

import os
import re
import secrets
from typing import Any

from agents import Model, set_tracing_disabled
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call

CALLS = 10_000
"""The calls of the model that one process answers."""


def model() -> Model | None:
    """The stand-in, or None for the SDK's own choice if there is a key for it."""
    if os.environ.get("OPENAI_API_KEY"):
        return None
    set_tracing_disabled(True)
    return ScriptedModel([ModelStep.respond(answer)] * CALLS)


def answer(call: ModelCall) -> list[Any]:
    """The reply to a conversation: a tool call, or a text."""
    items: list[Any] = call.input if isinstance(call.input, list) else []
    questions = [place for place, item in enumerate(items) if item.get("role") == "user"]
    question = items[questions[-1]] if questions else {"content": call.input}
    order = int((re.findall(r"\d+", str(question["content"])) or ["0"])[-1])
    since = items[questions[-1] :] if questions else []
    outputs = [item["output"] for item in since if item.get("type") == "function_call_output"]
    call_id = f"call_{secrets.token_hex(4)}"
    if not outputs:
        return [function_call("look_up", {"order": order}, call_id=call_id)]
    if len(outputs) == 1:
        euros = int(outputs[0].split()[0])
        return [function_call("refund", {"order": order, "euros": euros}, call_id=call_id)]
    return [assistant_message(f"Order {order}: {outputs[-1]}")]
