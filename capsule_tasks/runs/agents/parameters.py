"""The parameters of a function as a tool: their schema, and the arguments that a model gave."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from capsule_tasks.errors import InvalidSetting, WrongArguments
from capsule_tasks.runs.agents.contexts import RunContext, ToolContext
from capsule_tasks.runs.agents.docstrings import read_docstring
from capsule_tasks.runs.agents.schemas import (
    Codec,
    NotStrict,
    Schema,
    Unfit,
    codec_of,
    made_strict,
    with_default,
)

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters of a function, without a first one that takes the context."""

    tool: str
    description: str
    """The description of the function in its docstring."""
    schema: Schema
    strict: bool
    takes_context: bool
    _codec: Codec
    _signature: tuple[inspect.Parameter, ...]

    def decode(self, text: str) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments. Raises WrongArguments, which is for the model."""
        try:
            values = self._codec.decode(text.strip() or "{}")
        except Unfit as error:
            raise WrongArguments(self.tool, str(error)) from None
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for parameter in self._signature:
            value = getattr(values, parameter.name)
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                positional.extend(() if value is UNSET else value)
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(parameter.default if value is UNSET else value)
            elif value is not UNSET:
                named[parameter.name] = value
        return positional, named

    def check(self, text: str) -> None:
        """Raise WrongArguments unless the arguments fit."""
        self.decode(text)


def parameters_of(
    function: Callable[..., Any], tool: str, *, strict: bool | None = None
) -> Parameters:
    """The parameters of a function; `tool` names it in errors.

    The schema is strict if it can be. `strict=True` refuses a function whose schema cannot, and
    with `strict=False` it never is.
    """
    hints = _hints(function, tool)
    signature, takes_context = _without_context(function, tool, hints)
    documented = read_docstring(inspect.getdoc(_without_partials(function)))
    fields: list[tuple[str, Any, Any]] = []
    about: dict[str, str] = {}
    for parameter in signature:
        kind = hints.get(parameter.name, Any)
        about[parameter.name] = _text_in(kind) or documented.parameters.get(parameter.name, "")
        fields.append(_field(parameter, kind, tool))
    codec = Codec(msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True))
    schema = _completed(codec.schema, signature, about)
    try:
        made, is_strict = made_strict(schema, strict)
    except NotStrict as error:
        where, kind = ".".join((tool, *error.path)), hints.get(error.path[0], Any)
        must = f"of a type for a strict schema, but {error.reason}; or give strict=False"
        raise InvalidSetting(where, kind, must) from None
    return Parameters(
        tool, documented.text, made, is_strict, takes_context, codec, tuple(signature)
    )


def _without_context(
    function: Callable[..., Any], tool: str, hints: dict[str, Any]
) -> tuple[list[inspect.Parameter], bool]:
    try:
        signature = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidSetting(f"function of {tool}", function, f"a function: {error}") from None
    if isinstance(function, partial):  # what it binds is not for the model to choose
        signature = [each for each in signature if each.name not in function.keywords]
    takes_context = [_is_context(hints.get(each.name)) for each in signature]
    if any(takes_context[1:]):
        name = signature[takes_context.index(True, 1)].name
        raise InvalidSetting(f"{tool}.{name}", hints[name], "the first parameter")
    if takes_context[:1] == [True]:
        return _with_positions(signature[1:]), True
    return _with_positions(signature), False


def _with_positions(signature: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Parameters before a `*args` are given by position, those of other functions by name."""
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature):
        only = inspect.Parameter.POSITIONAL_ONLY
        return [
            each.replace(kind=only) if each.kind in _BY_POSITION else each for each in signature
        ]
    return signature


def _is_context(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, RunContext)


def _without_partials(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _hints(function: Callable[..., Any], tool: str) -> dict[str, Any]:
    function = _without_partials(function)
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = type(function).__call__  # an object that can be called
    # Modules often import these two for type checkers only.
    known = {"RunContext": RunContext, "ToolContext": ToolContext}
    known |= getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return get_type_hints(function, globalns=known, include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        must = f"annotated with types that exist when the tool is made ({error})"
        raise InvalidSetting(f"function of {tool}", function, must) from None


def _text_in(kind: Any) -> str:
    """A description in an annotation, such as `Annotated[int, "In euros."]`."""
    texts = [each for each in get_args(kind)[1:] if isinstance(each, str)]
    return texts[0] if get_origin(kind) is Annotated and texts else ""


def _field(parameter: inspect.Parameter, kind: Any, tool: str) -> tuple[str, Any, Any]:
    where = f"{tool}.{parameter.name}"
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        must = "a parameter of its own for each name, or one that is a dict"
        raise InvalidSetting(where, f"**{parameter.name}", must)
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        kind = list[kind]
    codec_of(kind, where)
    # An argument that the model leaves out is left out of the call, too: the function's own
    # default may be any object.
    if parameter.default is not parameter.empty or parameter.kind is parameter.VAR_POSITIONAL:
        return parameter.name, Union[kind, UnsetType], UNSET  # noqa: UP007  of any annotation
    return parameter.name, kind, msgspec.NODEFAULT


def _completed(schema: Schema, signature: list[inspect.Parameter], about: dict[str, str]) -> Schema:
    """The schema with descriptions and defaults of the parameters."""
    properties = {}
    for parameter in signature:
        node = schema["properties"][parameter.name]
        if text := about[parameter.name]:
            node = {"description": text, **node}
        if parameter.default is not parameter.empty:
            node = with_default(node, parameter.default)
        properties[parameter.name] = node
    return {**schema, "properties": properties}
