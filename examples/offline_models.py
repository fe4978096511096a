"""Models that need neither a network nor a key: each follows one rule.

With the key of a provider in the environment, the examples use a real model.
"""

import os
import re
from collections.abc import Callable
from typing import Any

from capsule_tasks.runs.models import Model, ModelRequest
from capsule_tasks.runs.records import Item
from capsule_tasks.testing.models import ScriptedModel, calls, hands_over

CALLS = 10_000
"""The calls of a model that one process answers."""


def model(answer: Callable[[ModelRequest], Any]) -> Model | str:
    """The stand-in that answers by this rule, or the name of a real model if there is a key."""
    if os.environ.get("OPENAI_API_KEY"):
        return os.environ.get("OPENAI_MODEL", "gpt-5-mini")
    return ScriptedModel([answer] * CALLS)


def pays_back(request: ModelRequest) -> Any:
    """Look the order up, pay it back, and say how that went."""
    question, outputs = _since_question(request)
    order = int((re.findall(r"\d+", question) or ["0"])[-1])
    if not outputs:
        return calls("look_up", {"order": order})
    if len(outputs) == 1:
        return calls("refund", {"order": order, "euros": int(outputs[0].split()[0])})
    return f"Order {order}: {outputs[-1]}"


def computes(request: ModelRequest) -> Any:
    """Run what is behind the colon of the question as Python, and say what it gives."""
    question, outputs = _since_question(request)
    if not outputs:
        return calls("run_python", {"code": question.partition(":")[2].strip()})
    return f"It gives {outputs[-1].strip()}"


def sorts(request: ModelRequest) -> Any:
    """Give questions about money to one agent, and all others to another one."""
    question, _ = _since_question(request)
    return hands_over("Billing" if "invoice" in question else "Shipping")


def serves(request: ModelRequest) -> Any:
    """Refund orders, hand invoices over, and say what the customer said before."""
    question, _ = _since_question(request)
    if "refund" in question.lower():
        return pays_back(request)
    if "invoice" not in question:
        said = [item for item in request.input if item.get("role") == "user"]
        before = f" You said before: {_text(said[-2])}" if len(said) > 1 else ""
        return f"How can I help you?{before}"
    is_billing = all(tool.name != "transfer_to_billing" for tool in request.tools)
    return "Your invoice is on its way." if is_billing else hands_over("Billing")


def answers_for(department: str) -> Callable[[ModelRequest], Any]:
    """Answer in the name of a department."""
    return lambda request: f"{department}: {_since_question(request)[0]} We will see to it."


def _since_question(request: ModelRequest) -> tuple[str, list[str]]:
    """The last question of the user, and the outputs of tools since then."""
    items = list(request.input)
    place = max(n for n, item in enumerate(items) if item.get("role") == "user")
    outputs = [item for item in items[place:] if item.get("type") == "function_call_output"]
    return _text(items[place]), [item["output"] for item in outputs]


def _text(message: Item) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
