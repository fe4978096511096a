"""Lua scripts: read from `lua/`, put together with what they use, and described by their header.

A header is the comment at the top of a file: what the script is for, then KEYS, ARGV, RETURNS,
REFUSES and USES. Python declares a script as a function without a body, whose parameters are what
the header names; calls pass them by name, so that a type checker sees each one:

    @script("workers/lease_renew")
    def lease_renew(keys: WorkerKeys, *, token: str, lease_ms: int, lapsed_ttl_ms: int) -> None: ...

    call = lease_renew.call(keys, token=token, lease_ms=1000, lapsed_ttl_ms=5000)

A declaration that its header does not fit is refused when its module is imported.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache, update_wrapper
from importlib.resources import files
from typing import Any, Generic, ParamSpec

import msgspec

from capsule_tasks.errors import InternalError


class Code(IntEnum):
    """The first element of every reply."""

    DONE = 0
    FORGOTTEN = 1
    ABANDONED = 20
    CONFLICT = 2
    FULL = 3
    LOST = 4
    MISSING = 5
    HELD = 6
    ENDED = 7
    WAITING = 8
    STALE = 9
    UNREADABLE = 10
    CHANGED = 11
    UNCERTAIN = 12
    DECIDED = 13
    DENIED = 14
    LATE = 15
    UNKNOWN = 16
    STARTED = 17
    EXPIRED = 18
    FINISHED = 19
    UNLISTED = 21
    BUSY = 22
    UNFINISHED = 23


P = ParamSpec("P")


@dataclass(frozen=True)
class Script(Generic[P]):
    """A script with the names of what it is called with."""

    name: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    source: str
    sha: str
    call: Callable[P, Call]
    """Makes a call of it; takes what its declaration takes."""


Argument = str | bytes | int


class Call(msgspec.Struct, gc=False, eq=False):
    """One call of a script: what goes over the wire."""

    script: Script[...]
    keys: Sequence[str]
    args: list[Argument]

    @property
    def operation_id(self) -> str | None:
        """The operation of a write, which so can be repeated and abandoned."""
        is_write = self.script.args[:2] == ("operation_id", "age_ms")
        return str(self.args[0]) if is_write else None

    def packed(self, command: bytes, script: str) -> bytes:
        """The bytes of EVALSHA with the script's digest, or of EVAL with its source.

        The client library does the same for any command, at twice the time for a batch of ten.
        """
        words = (*self.keys, *self.args)
        head = _head(command, script, len(self.keys))
        return b"*%d\r\n%b%b" % (len(words) + 3, head, _bulk(words))

    def repeated(self, age_ms: int) -> Call:
        """The same call, which says that it was sent before."""
        if self.operation_id is None:
            return self
        return Call(self.script, self.keys, [self.args[0], age_ms, *self.args[2:]])


@lru_cache(maxsize=500)
def _head(command: bytes, script: str, keys: int) -> bytes:
    return _bulk((command, script, keys))


def packed(words: Sequence[Argument]) -> bytes:
    """One command as it goes over the wire."""
    return b"*%d\r\n%b" % (len(words), _bulk(words))


def _bulk(words: Sequence[Argument]) -> bytes:
    parts: list[bytes] = []
    for word in words:
        raw = word if type(word) is bytes else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


def script(name: str) -> Callable[[Callable[P, None]], Script[P]]:
    """Declare the script in `lua/<name>.lua`; see above.

    Keyword-only parameters are ARGV in their order, but for `age_ms`, which only a repeat sets, and
    a `channel` that `keys` have; where the header says `record...` the parameter is `records`, a
    sequence. The other parameters are KEYS of the same name, and `keys` is an object that has the
    other keys as attributes.
    """

    def declared(declaration: Callable[P, None]) -> Script[P]:
        sections, source = sections_of(text_of(name)), _assembled(name)
        keys, args = _names(sections["KEYS"]), _names(sections["ARGV"])
        sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        scope: dict[str, Any] = {"Call": Call}
        # Text of our own, compiled once, as a dataclass does: a call costs no more than by hand.
        call: Callable[P, Call] = eval(_call_maker(name, keys, args, declaration), scope)  # noqa: S307
        update_wrapper(call, declaration)
        scope["script"] = made = Script(name, keys, args, source, sha, call)
        return made

    return declared


def _names(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line.split()[0] for line in lines)


_IMPLIED = {"age_ms": "0", "channel": "keys.channel"}
"""Arguments that a declaration need not name."""


def _call_maker(
    name: str, key_names: Sequence[str], arg_names: Sequence[str], declaration: Callable[..., None]
) -> str:
    """The text of a function that puts what it is given into a call, in the header's order."""
    code = declaration.__code__
    places, words = code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount :]
    keys = {_plain(key): key for key in key_names}
    args = {_parameter(arg): arg for arg in arg_names}
    expected = [parameter for parameter in args if parameter in words or parameter not in _IMPLIED]
    is_fit = [*words] == expected and {*places} <= {"keys", *keys}
    if not is_fit or not ("keys" in places or {*keys} <= {*places}):
        raise InternalError(
            f"script {name!r} takes KEYS {[*keys]} and ARGV {expected}; it is declared with "
            f"{[*places]} and {[*words]}"
        )
    taken = [_spread(full, own if own in places else f"keys.{own}") for own, full in keys.items()]
    passed = [_spread(arg, own if own in words else _IMPLIED[own]) for own, arg in args.items()]
    parameters = ", ".join([*places, *(["*", *words] if words else [])])
    return f"lambda {parameters}: Call(script, ({', '.join(taken)},), [{', '.join(passed)}])"


def _plain(name: str) -> str:
    return name.removesuffix("...")


def _parameter(arg: str) -> str:
    return f"{_plain(arg)}s" if arg.endswith("...") else arg


def _spread(name: str, expression: str) -> str:
    return f"*{expression}" if name.endswith("...") else expression


@cache
def text_of(name: str) -> str:
    """A file of `lua/`, as it is written."""
    return (files("capsule_tasks.storage") / "lua" / f"{name}.lua").read_text("utf-8")


def _assembled(name: str) -> str:
    text = text_of(name)
    codes = ", ".join(Code.__members__)
    values = ", ".join(str(code.value) for code in Code)
    used = " ".join(sections_of(text)["USES"]).split(",")
    shared = [text_of(f"lib/{part.strip()}") for part in used]
    return "\n".join([f"local {codes} = {values}", *shared, text])


_SECTION = re.compile(r"^(KEYS|ARGV|RETURNS|REFUSES|USES)\b ?(.*)$")


def sections_of(text: str) -> dict[str, list[str]]:
    """The lines of each part of a script's header, by its name; refuses one that lacks a part.

    The purpose has no name.
    """
    sections: dict[str, list[str]] = {"": []}
    current = sections[""]
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        content = line.removeprefix("--").removeprefix(" ")
        if section := _SECTION.match(content):
            current = sections.setdefault(section[1], [])
            content = section[2]
        if content.strip():
            current.append(content.strip())
    if missing := {"KEYS", "ARGV", "RETURNS", "REFUSES", "USES"} - sections.keys():
        raise InternalError(f"a script's header lacks {', '.join(sorted(missing))}: {text[:80]!r}")
    return sections
