"""Functions as tools: their schemas, their arguments, and what makes no tool."""

import asyncio
import enum
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from capsule_tasks.errors import InvalidSetting, ToolTimeout, WrongArguments
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext, ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.tools import Tool


def context() -> ToolContext:
    about = {"tool": "bare:t", "call_id": "c1", "key": "c1", "arguments": "{}"}
    return ToolContext(run_id="r", agent=Agent(name="A"), **about)


async def called(tool: Tool, arguments: str = "{}") -> Any:
    return await tool.call(context(), arguments)


class Color(enum.Enum):
    RED = "red"


class Order(msgspec.Struct):
    number: int
    color: Color = Color.RED


class Customer(pydantic.BaseModel):
    name: str
    age: int = 0


async def test_a_function_is_described_by_its_signature_and_its_docstring() -> None:
    @function_tool
    async def refund(order: int, euros: Annotated[int, "In euros."] = 3) -> str:
        """Pay an order back.

        Args:
            order: The number of the order.
        """
        return f"{order}: {euros}"

    spec = refund.as_spec()
    assert (spec.name, spec.description, spec.strict) == ("refund", "Pay an order back.", True)
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "order": {"type": "integer", "description": "The number of the order."},
            "euros": {
                "anyOf": [{"type": "integer"}, {"type": "null"}],
                "description": "In euros. (Default: 3)",
            },
        },
        "required": ["order", "euros"],
        "additionalProperties": False,
    }
    assert await called(refund, '{"order": 1, "euros": null}') == "1: 3"
    assert await called(refund, '{"order": 1, "euros": 2}') == "1: 2"


async def test_options_become_those_of_the_tool() -> None:
    @function_tool(
        name="pay", description="Pays.", namespace="crm", needs_approval=True, timeout_s=3,
        on_uncertain="retry", is_enabled=False, on_error="raise", strict=False,
    )  # fmt: skip
    def refund(order: int = 3) -> int:
        """Not shown."""
        return order

    assert refund.key.text == "namespaced:crm/pay"
    assert (refund.description, refund.needs_approval, refund.timeout_s) == ("Pays.", True, 3)
    assert (refund.on_uncertain, refund.on_error) == ("retry", "raise")
    assert (refund.is_enabled, refund.strict) == (False, False)
    assert refund.parameters["properties"] == {"order": {"type": "integer", "default": 3}}
    assert await called(refund) == 3


async def test_a_first_parameter_may_take_the_context() -> None:
    @function_tool
    def of_call(about: ToolContext, a: int) -> str:
        return f"{about.call_id}{a}"

    @function_tool
    async def of_run(about: RunContext) -> str:
        return about.run_id

    assert list(of_call.parameters["properties"]) == ["a"]
    assert await called(of_call, '{"a": 1}') == "c11"
    assert (await called(of_run), of_run.parameters["properties"]) == ("r", {})


async def test_all_kinds_of_parameters_get_their_arguments() -> None:
    kept: list[int] = []

    @function_tool
    def collect(a: int, /, b: int = 2, *rest: int, c: int, d: Any = kept) -> Any:
        return a, b, rest, c, d is kept

    assert collect.parameters["properties"]["rest"] == (
        {"type": "array", "items": {"type": "integer"}}
    )
    assert await called(collect, '{"a": 1, "c": 3}') == (1, 2, (), 3, True)
    assert await called(collect, '{"a": 1, "b": 5, "rest": [6, 7], "c": 3, "d": 4}') == (
        (1, 5, (6, 7), 3, False)
    )


async def test_nested_types_and_classes_of_pydantic_are_decoded() -> None:
    @function_tool(strict=True)
    def buy(order: Order, who: Customer, size: Literal["s", "m"] | None = None) -> Any:
        return order, who, size

    who = buy.parameters["properties"]["who"]
    assert (who["required"], who["additionalProperties"]) == (["name", "age"], False)
    arguments = '{"order": {"number": 1}, "who": {"name": "Ada", "age": null}, "size": "s"}'
    assert await called(buy, arguments) == (Order(1), Customer(name="Ada"), "s")
    with pytest.raises(WrongArguments, match="age: Input should be a valid integer"):
        await called(buy, '{"order": {"number": 1}, "who": {"name": "Ada", "age": "x"}}')


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"a": "x"}', r"Expected `int`, got `str` - at `\$.a`"),
        ("", "missing required field `a`"),
        ('{"a": 1, "b": 2}', "unknown field `b`"),
        ("a", "not JSON"),
    ],
)
async def test_wrong_arguments_are_explained_to_the_model(arguments: str, reason: str) -> None:
    calls = []

    @function_tool
    def count(a: int) -> None:
        calls.append(a)

    with pytest.raises(WrongArguments, match=f"the arguments of count are wrong: .*{reason}"):
        await called(count, arguments)
    assert count.check is not None
    with pytest.raises(WrongArguments, match=reason):
        count.check(arguments)
    assert calls == []


async def test_a_blocking_function_runs_in_a_thread_and_a_timeout_leaves_it_there() -> None:
    begun, release, threads = threading.Event(), threading.Event(), list[str]()

    class Begun(ThreadPoolExecutor):
        """Takes a function only once it runs: a call that waits for a thread is not begun."""

        def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(*args, **kwargs)
            begun.wait(10)
            return future

    @function_tool(timeout_s=0.01)
    def block() -> None:
        threads.append(threading.current_thread().name)
        begun.set()
        release.wait(10)

    asyncio.get_running_loop().set_default_executor(Begun(1))
    with pytest.raises(ToolTimeout, match=r"block ran longer than 0.01 s"):
        await called(block)
    release.set()
    assert threads
    assert threads != [threading.main_thread().name]


async def test_an_error_about_time_of_the_tool_itself_is_no_timeout() -> None:
    @function_tool(timeout_s=10)
    async def fail() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await called(fail)


async def test_methods_partials_and_objects_are_functions_too() -> None:
    class Shop:
        async def sell(self, a: int) -> int:
            return a

        async def __call__(self, a: int) -> int:
            return a + 1

    def add(a: int, b: int) -> int:
        """Add up."""
        return a + b

    assert await called(function_tool(Shop().sell), '{"a": 1}') == 1
    assert await called(function_tool(name="shop")(Shop()), '{"a": 1}') == 2
    bound = function_tool(name="add")(partial(add, 1))
    assert await called(bound, '{"b": 2}') == 3
    hidden = function_tool(name="add")(partial(add, b=2))
    assert (list(hidden.parameters["properties"]), hidden.description) == (["a"], "Add up.")
    assert await called(hidden, '{"a": 2}') == 4
    assert await called(function_tool(name="sell")(lambda: Shop().sell(3))) == 3


def takes_any_names(**options: int) -> None: ...
def takes_context_late(a: int, about: ToolContext) -> None: ...
def takes_object(a: object) -> None: ...
def takes_two_structs(a: Order | Customer) -> None: ...
def takes_unknown(a: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def takes_mapping(a: int, b: dict[str, int]) -> None: ...
def takes_anything(a) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (takes_any_names, r"takes_any_names\.options"),
        (takes_context_late, r"takes_context_late\.about .* must be the first parameter"),
        (takes_object, r"takes_object\.a .*cannot be decoded from JSON"),
        (takes_two_structs, r"takes_two_structs\.a .*custom type"),
        (takes_unknown, "name 'Missing' is not defined"),
        (3, "must be a function"),
        (lambda: 1, "<lambda>.*letters"),
    ],
)
def test_what_makes_no_tool_is_named(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        function_tool(function)


@pytest.mark.parametrize("function", [takes_mapping, takes_anything])
def test_a_schema_that_cannot_be_strict_is_not_unless_asked_for(
    function: Callable[..., Any],
) -> None:
    assert function_tool(function).strict is False
    with pytest.raises(InvalidSetting, match=rf"{function.__name__}\.(a|b) .*strict=False"):
        function_tool(strict=True)(function)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"name": ""}, "function_tool.name"),
        ({"name": "with space"}, "function_tool.name"),
        ({"name": "x" * 65}, "function_tool.name"),
        ({"description": 3}, "description"),
        ({"namespace": "a b"}, "namespace"),
        ({"needs_approval": "yes"}, "needs_approval"),
        ({"is_enabled": None}, "is_enabled"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "3"}, "timeout_s"),
        ({"on_error": "ignore"}, "on_error"),
        ({"on_uncertain": "again"}, "on_uncertain"),
        ({"limits": 3}, "limits"),
        ({"input_guardrails": [3]}, r"input_guardrails\[0\]"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        function_tool(**options)(takes_mapping)
