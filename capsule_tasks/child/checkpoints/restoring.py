"""Restoring a saved namespace.

The index tells where the pickle of each name is. So a name that cannot come back is left out, and
with it names that share objects with it; the others are restored.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from capsule_tasks.child.checkpoints.index import (
    CODE_TYPE,
    LIVE_NAMESPACE,
    Index,
    NotSaved,
    index_of,
    reason_of,
)
from capsule_tasks.child.checkpoints.packages import differences, python_version
from capsule_tasks.child.checkpoints.pieces import PieceReader
from capsule_tasks.child.executors.namespace import is_users
from capsule_tasks.protocol.values import sendable

if TYPE_CHECKING:
    from pickletools import OpcodeInfo

_GETS = frozenset({"BINGET", "LONG_BINGET"})
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"})
_LITERALS = frozenset(
    {
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    }
)
"""Opcodes that push their argument."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class _Sign:
    """Stands for something else."""


_UNKNOWN = _Sign()
"""Stands in the memo for an object that is lost."""
_MARK = _Sign()
"""The mark on the stack of an unpickler."""


class Restored(NamedTuple):
    """The names that came back, those that could not, and packages of another version."""

    names: tuple[str, ...]
    lost: dict[str, str]
    differences: dict[str, str]


def enter_restore(pieces: list[bytes], mode: str, module: ModuleType) -> Restored:
    """Restore saved names in the module; after a failure the module is exactly as it was.

    The list of pieces is empty then: each is freed as soon as its names are restored.

    A failure is data that is no checkpoint, a stop, or too little memory. Names that cannot come
    back are no failure.
    """
    namespace = module.__dict__
    before = dict(namespace)
    try:
        reader = PieceReader(pieces)
        index = index_of(reader)
        if mode == "replace":
            for name in [name for name in namespace if is_users(name)]:
                del namespace[name]
        values, lost = _Restoring(reader, namespace, index).values()
        namespace.update(values)
    except BaseException:
        namespace.clear()
        namespace.update(before)
        raise
    names = tuple(sorted(map(sendable, values)))
    return Restored(names, lost, differences({"python": index.python, **index.packages}))


class _Restoring:
    """Loads one name after the other, and goes on after one that cannot be loaded.

    The names share the memo of one unpickler, in which each object has a number. So of a name that
    is lost the number of objects has to be known, and what names after it may use of them: texts,
    and functions and classes of modules.
    """

    def __init__(self, reader: PieceReader, namespace: dict[str, Any], index: Index) -> None:
        self._reader = reader
        self._entries = index.entries
        self._mark = index.mark
        is_foreign = index.python.split(".")[:2] != python_version().split(".")[:2]
        made_by = index.python if is_foreign else None
        self._new_loader = functools.partial(_Loader, reader, namespace, made_by)
        self._loader = self._new_loader()
        self._owner_of: dict[int, str] = {}
        """The lost names that lost objects belong to."""

    def values(self) -> tuple[dict[str, Any], dict[str, str]]:
        found: dict[str, Any] = {}
        lost: dict[str, str] = {}
        begin = 0
        for number, (name, end) in enumerate(self._entries):
            try:
                if owner := self._lost_owner(begin, end):
                    lost[name] = f"it shares an object with {owner!r:.100}, which is lost"
                    self._pass_over(name, begin, end)
                else:
                    self._reader.seek(begin)
                    _, key, value = self._loader.load()
                    found[key] = value
            except MemoryError:
                raise
            except Exception as fault:
                lost[name] = reason_of("", fault)
                self._start_again_before(number)
                self._pass_over(name, begin, end)
            self._reader.free(end)
            begin = end
        return found, lost

    def _lost_owner(self, begin: int, end: int) -> str | None:
        """The lost name whose objects the pickle in these bytes uses."""
        if not self._owner_of:
            return None
        used = (at for opcode, at in self._opcodes(begin, end) if opcode.name in _GETS)
        return next((self._owner_of[at] for at in used if at in self._owner_of), None)

    def _start_again_before(self, number: int) -> None:
        """Take another unpickler, whose memo is as it was before this name.

        The one that failed has read ahead, and has put half-made objects into its memo.
        """
        memo: dict[int, Any] = self._loader.memo.copy()
        mark = f"{self._mark}{number}"
        marks = (at for at, each in memo.items() if type(each) is str and each == mark)
        first = next(marks, len(memo))
        self._loader = self._new_loader()
        self._loader.memoize([memo[at] for at in range(first)])

    def _pass_over(self, name: str, begin: int, end: int) -> None:
        """Put into the memo what the pickle of a lost name would have put there."""
        memo: dict[int, Any] = self._loader.memo.copy()
        first = len(memo)
        stack: list[Any] = []
        for opcode, argument in self._opcodes(begin, end):
            if opcode.name == "MEMOIZE":
                if stack[-1] is _UNKNOWN:
                    self._owner_of[len(memo)] = name
                memo[len(memo)] = stack[-1]
                continue
            taken = _taken(stack, opcode)
            is_known = not any(each is _UNKNOWN for each in taken)
            if opcode.name in _GETS:
                stack.append(memo.get(argument, _UNKNOWN))
            elif opcode.name == "STACK_GLOBAL" and is_known:
                stack.append(self._global(*taken))
            elif opcode.name in _TUPLES and is_known:
                stack.append(tuple(taken))
            elif opcode.name in _LITERALS:
                stack.append(argument)
            elif opcode.name in _CONSTANTS:
                stack.append(_CONSTANTS[opcode.name])
            else:
                stack += [_MARK if each.name == "mark" else _UNKNOWN for each in opcode.stack_after]
        self._loader.memoize([memo[at] for at in range(first, len(memo))])

    def _opcodes(self, begin: int, end: int) -> Iterator[tuple[OpcodeInfo, Any]]:
        from pickletools import genops

        self._reader.seek(begin)
        found = genops(self._reader.read(end - begin))
        return ((opcode, argument) for opcode, argument, _ in found)

    def _global(self, module: Any, name: Any) -> Any:
        try:
            return self._loader.find_class(module, name)
        except Exception:
            return _UNKNOWN


def _taken(stack: list[Any], opcode: OpcodeInfo) -> list[Any]:
    """Remove from the stack the operands of an opcode, and return them without marks."""
    taken: list[Any] = []
    for kind in reversed(opcode.stack_before):
        if kind.name == "stackslice":
            while stack[-1] is not _MARK:
                taken.append(stack.pop())
        else:
            each = stack.pop()
            if each is not _MARK:
                taken.append(each)
    return taken[::-1]


class _Loader(pickle.Unpickler):
    def __init__(self, file: PieceReader, namespace: dict[str, Any], made_by: str | None) -> None:
        super().__init__(file)
        self._namespace = namespace
        self._made_by = made_by
        """The Python whose bytecode this one cannot run."""
        self._reader = file
        self._objects: list[Any] = []

    def memoize(self, objects: list[Any]) -> None:
        """Put objects into the memo, behind those that are there."""
        self._objects = objects
        puts = (b"J" + number.to_bytes(4, "little") + b"Q\x940" for number in range(len(objects)))
        self._reader.seek_to(b"\x80\x05" + b"".join(puts) + b"N.")
        self.load()
        self._objects = []

    def persistent_load(self, pid: Any) -> Any:
        if pid == LIVE_NAMESPACE:
            return self._namespace
        if pid == CODE_TYPE:
            return self._code_type()
        if type(pid) is int:
            return self._objects[pid]
        name, below = pid
        module = importlib.import_module(name)
        for other in below:
            if other not in sys.modules:
                with contextlib.suppress(Exception):  # another version may not have it
                    importlib.import_module(other)
        return module

    def _code_type(self) -> type[CodeType]:
        if self._made_by:
            here = python_version()
            raise NotSaved(f"compiled by Python {self._made_by}; Python {here} cannot run it")
        return CodeType
