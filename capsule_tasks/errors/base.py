"""The root of all errors, its branches, and how an error is declared."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, dataclass_transform

_MAX_SHOWN = 100
_MAX_SHOWN_SETTING = 300


class CapsuleError(Exception):
    """Root of every error raised by capsule_tasks; all of them can be copied and pickled.

    `args` are the fields of a described error, of others the message. Celery makes an error of a
    stored result from its class and its `args`, so both come back from a result backend. A field
    that the serializer of the backend cannot write comes back as its `repr`.
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[Mapping[str, Any]] = {}
    _template: ClassVar[str] = ""

    def __init__(self, *args: Any, **named: Any) -> None:
        """The fields of a described error; for others the message."""
        if self._fields:
            args = self._complete(args, named)
        super().__init__()
        self.args = args  # an OSError, as TimeoutError is, would keep two of them only

    @classmethod
    def declare(cls, template: str) -> None:
        """Make the annotations of the class its fields; for `described`."""
        own = {name: vars(cls)[name] for name in cls.__annotations__ if name in vars(cls)}
        cls._defaults = {**cls._defaults, **own}
        for place, (name, kind) in enumerate(cls.__annotations__.items(), len(cls._fields)):
            setattr(cls, name, _Field(place, is_tuple=str(kind).startswith("tuple")))
        cls._fields = (*cls._fields, *cls.__annotations__)
        cls._template = template

    def _complete(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The value of each field, in order."""
        values = {**self._defaults, **dict(zip(self._fields, given, strict=False)), **named}
        if missing := [field for field in self._fields if field not in values]:
            raise TypeError(f"{type(self).__name__} needs {', '.join(missing)}")
        if len(given) > len(self._fields) or len(values) > len(self._fields):
            raise TypeError(f"{type(self).__name__} has no fields but {', '.join(self._fields)}")
        return tuple(values[field] for field in self._fields)

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the class with `args`, which some classes take by name only.
        return _remade, (type(self), self.args), self.__dict__

    def __str__(self) -> str:
        if self._fields:
            return _TEMPLATE.vformat(self._template, (self,), {})
        # Log lines and other errors end in this text: without a message the type is the reason.
        return super().__str__() or type(self).__name__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def _remade(kind: type[CapsuleError], args: tuple[Any, ...]) -> CapsuleError:
    error = kind.__new__(kind)
    error.args = args
    return error


class _Field:
    """A field of a described error: its place in `args`, so that both are always the same."""

    def __init__(self, place: int, *, is_tuple: bool) -> None:
        self._place = place
        self._is_tuple = is_tuple

    def __get__(self, error: CapsuleError | None, kind: type[CapsuleError]) -> Any:
        if error is None:
            return self
        value = error.args[self._place]
        return tuple(value) if self._is_tuple else value  # JSON has lists only

    def __set__(self, error: CapsuleError, value: Any) -> None:
        error.args = (*error.args[: self._place], value, *error.args[self._place + 1 :])


E = TypeVar("E", bound=CapsuleError)


@dataclass_transform(eq_default=False)
def described(template: str) -> Callable[[type[E]], type[E]]:
    """Declare an error by its annotated fields and a template of its message.

    The fields become the parameters of its constructor, and attributes. In the template `{field}`
    stands for the text of a field or property, and `{field!r}` for its representation, shortened.
    The items of a tuple are separated by commas. `{field:nobody}` is `nobody` for an empty field.
    """

    def describe(kind: type[E]) -> type[E]:
        kind.declare(template)
        return kind

    return describe


class _Template(string.Formatter):
    """Fills the template of an error with its fields and properties."""

    def get_value(self, key: int | str, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> object:
        return getattr(args[0], str(key))

    def convert_field(self, value: object, conversion: str | None) -> object:
        return value if conversion is None else shortened(value, _MAX_SHOWN)

    def format_field(self, value: object, if_empty: str) -> str:
        return (", ".join(value) if isinstance(value, tuple) else str(value)) or if_empty


_TEMPLATE = _Template()


def shortened(value: object, max_size: int) -> str:
    """The representation of a value, which may be large."""
    text = repr(value)
    return text if len(text) <= max_size else f"{text[:max_size]}…"


def reason_of(error: BaseException) -> str:
    """The text of an error for a log line or another error; its type if it has no text.

    The error may be of any program: its text may be one that UTF-8 lacks, and may raise itself.
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001
        text = ""
    return text.encode("utf-8", "backslashreplace").decode() or type(error).__name__


class CallerError(CapsuleError):
    """The caller asked for something that cannot be done as asked."""


class RetryError(CapsuleError):
    """The same call may succeed when it is made again."""


class OperatorError(CapsuleError):
    """The deployment has to change before the call can succeed."""


class InternalError(CapsuleError):
    """A promise of this package was broken: please report it."""


@described("{name} = {shown}: must be {must}")
class InvalidSetting(CallerError, ValueError):
    """A setting has a value outside its limits."""

    name: str
    value: object
    must: str

    @property
    def shown(self) -> str:
        return shortened(self.value, _MAX_SHOWN_SETTING)


@described("the {what} {value!r} {reason}")
class InvalidId(CallerError, ValueError):
    """An id cannot be part of a key."""

    what: str
    value: object
    reason: str


class ExecutionCancelled(KeyboardInterrupt):
    """Raised inside an execution that is being cancelled.

    It derives from KeyboardInterrupt because asyncio swallows any other BaseException raised
    inside a callback, and so that libraries treat it as the Ctrl-C they already know.
    """
