"""How settings are declared: as structs whose annotations are the rules for their values.

msgspec applies the annotations of a struct to what it decodes, but not to what a constructor is
called with. `Checked` applies the same annotations there.
"""

# The annotations are needed as objects when a settings struct is first made, also by each child:
# without `from __future__ import annotations` nothing has to be evaluated then.
import inspect
import operator
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from capsule_tasks.errors import InvalidSetting

T = TypeVar("T")

KIB = 1024
MIB = 1024 * KIB

_MAX_SECONDS = 10**9
"""Three decades; beyond three centuries the timers of the system fail."""
_MAX_COUNT = 2**63 - 1

Seconds = Annotated[float, Meta(ge=0)]
PositiveSeconds = Annotated[float, Meta(ge=0.001)]
BriefSeconds = Annotated[float, Meta(ge=0.0001)]
"""For what happens many times a second."""
TimeToLive = Annotated[float, Meta(ge=1)]
"""Seconds until Redis forgets something."""
Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(ge=1)]
ByteCount = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]
"""Not empty, and without characters that UTF-8 cannot write."""
Kibibytes = Annotated[int, Meta(ge=KIB)]
"""Bytes, at least a KiB of them."""

Relations = tuple[tuple[str, str, str], ...]
_SIGNS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "<=": (operator.le, "at most"),
    ">=": (operator.ge, "at least"),
    ">": (operator.gt, "more than"),
}


class Checked(msgspec.Struct, frozen=True):
    """A struct. Making one refuses any value that its annotation does not allow."""

    def __post_init__(self) -> None:
        for name, rule in _rules_of(type(self)).items():
            value = getattr(self, name)
            if not rule.allows(value):
                raise InvalidSetting(f"{type(self).__name__}.{name}", value, rule.must)


class Settings(Checked, frozen=True, kw_only=True):
    """A group of settings."""

    _relations: ClassVar[Relations] = ()
    """Limits of one setting that depend on another: `(("min_idle", "<=", "max_sessions"),)`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, sign, other in self._relations:
            value, bound = attrgetter(name)(self), attrgetter(other)(self)
            holds, words = _SIGNS[sign]
            if not holds(value, bound):
                must = f"{words} {self._full_name(other)} ({bound})"
                raise InvalidSetting(self._full_name(name), value, must)

    def _full_name(self, path: str) -> str:
        owner, _, name = path.rpartition(".")
        return f"{type(attrgetter(owner)(self) if owner else self).__name__}.{name}"


def checked_setting(kind: type[Settings], field: str, value: T, name: str) -> T:
    """A value for one field, if the field allows it; else InvalidSetting under another name."""
    check_value(name, value, kind.__annotations__[field])
    return value


def check_value(name: str, value: object, kind: Any) -> None:
    """Refuse a value that an annotation does not allow."""
    rule = rule_of(kind)
    if rule.allows(value):
        return
    if get_origin(kind) is list and isinstance(value, list):
        for index, each in enumerate(value):
            check_value(f"{name}[{index}]", each, get_args(kind)[0])
    raise InvalidSetting(name, value, rule.must)


class Rule(msgspec.Struct, frozen=True):
    """The values that an annotation allows, as a test and in words."""

    allows: Callable[[Any], bool]
    must: str


@cache
def _rules_of(kind: type[Checked]) -> dict[str, Rule]:
    return {name: rule_of(kind.__annotations__[name]) for name in kind.__struct_fields__}


@cache
def rule_of(kind: Any) -> Rule:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _bounded(*args)
    if origin is Literal:
        return Rule(args.__contains__, "one of " + ", ".join(map(repr, args)))
    if origin in {Union, UnionType}:
        rules = [rule_of(each) for each in args if each is not NoneType]
        takes_none = NoneType in args
        musts = " or ".join(rule.must for rule in rules).replace(" or of type ", " or ")
        return Rule(
            lambda value: (value is None and takes_none) or any(r.allows(value) for r in rules),
            musts + (", or None" if takes_none else ""),
        )
    if origin in {tuple, list, frozenset}:
        item = rule_of(args[0])
        return Rule(
            lambda value: isinstance(value, origin) and all(map(item.allows, value)),
            f"a {origin.__name__} of {_name_of(args[0])}",
        )
    if origin is Callable:
        return _function_of(None if args[0] is ... else len(args[0]))
    if origin in {dict, Mapping}:
        key, item = map(rule_of, args)
        return Rule(
            lambda value: (
                isinstance(value, origin)
                and all(map(key.allows, value))
                and all(map(item.allows, value.values()))
            ),
            f"a {origin.__name__.lower()} of {args[0].__name__} to {args[1].__name__}",
        )
    return Rule(lambda value: kind is Any or _is(value, kind), f"of type {kind.__name__}")


def _name_of(kind: Any) -> str:
    if get_origin(kind) in {Union, UnionType}:
        return " or ".join(map(_name_of, get_args(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    name: str = getattr(kind, "__origin__", kind).__name__
    return name


def _function_of(count: int | None) -> Rule:
    if count is None:
        return Rule(callable, "a function")
    return Rule(lambda value: takes(value, count), f"a function of {count} arguments")


def takes(value: object, count: int) -> bool:
    """Whether this can be called with so many arguments, as far as it says."""
    if not callable(value):
        return False
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return True  # written in C, and says nothing
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _bounded(kind: Any, bounds: Meta) -> Rule:
    if kind is str:
        return Rule(_is_text, "text, not empty, that UTF-8 can write")
    if bounds.min_length is not None:
        most, rule = bounds.min_length, rule_of(kind)
        return Rule(
            lambda value: rule.allows(value) and len(value) >= most,
            f"{rule.must}, with at least {most} of them",
        )
    is_count = kind is int
    types, noun, limit = (
        (int, "whole number", _MAX_COUNT)
        if is_count
        else ((int, float), "number of seconds", _MAX_SECONDS)
    )
    low, high = bounds.ge, bounds.le or limit
    return Rule(
        lambda value: _is(value, types) and low <= value <= high, f"a {noun} from {low} to {high}"
    )


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _is(value: object, kind: type | tuple[type, ...]) -> bool:
    """Like isinstance, but True and False are no numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
