"""Definitions of a session keep working after a restore."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest

from tests.unit.child.checkpoints.namespaces import Child, moved, namespace_of, saved

DEFINITIONS = {
    "function": ("def f(x, *, y=2): return x + y", "f(1)", 3),
    "closure": ("def make(n):\n  def add(x): return x + n\n  return add\nf = make(4)", "f(1)", 5),
    "shared cell": (
        ("def make():\n  n = 0\n  def up():\n    nonlocal n\n    n += 1\n    return n\n"
        "  def get(): return n\n  return up, get\nup, get = make(); up()"),
        "up() - get()",
        0,
    ),
    "lambda": ("f = lambda x: x * 2", "f(4)", 8),
    "recursion": ("def f(n): return 1 if n < 2 else n * f(n - 1)", "f(5)", 120),
    "decorator": (
        ("import functools\ndef twice(f):\n  @functools.wraps(f)\n  def g(*a): return 2 * f(*a)\n"
        "  return g\n@twice\ndef f(x):\n  'doc'\n  return x"),
        "(f(3), f.__name__, f.__doc__, f.__wrapped__(3))",
        (6, "f", "doc", 3),
    ),
    "lru_cache": (
        "import functools\n@functools.lru_cache(maxsize=7)\ndef f(x): return x + 1\nf(1)",
        "(f(1), f.cache_info().maxsize, f.__name__)",
        (2, 7, "f"),
    ),
    "cached method": (
        "import functools\nclass C:\n  @functools.cache\n  def f(self): return 5\nc = C(); c.f()",
        "c.f()",
        5,
    ),
    "cached property": (
        ("import functools\nclass C:\n  @functools.cached_property\n  def p(self): return [6]\n"
        "c = C(); d = C(); c.p"),
        "(c.p, d.p, 'p' in vars(c))",
        ([6], [6], True),
    ),
    "dataclass": (
        ("import dataclasses\n@dataclasses.dataclass(frozen=True, order=True)\nclass P:\n"
        "  x: int\n  y: list = dataclasses.field(default_factory=list)\np = P(1)"),
        ("(p == P(1), dataclasses.replace(p, x=2).x, p < P(2), [f.name for f in "
        "dataclasses.fields(P)])"),
        (True, 2, True, ["x", "y"]),
    ),
    "slots": (
        "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass P:\n  x: int\np = P(3)",
        "(p.x, hasattr(p, '__dict__'))",
        (3, False),
    ),
    "enum": (
        "import enum\nclass Colour(enum.Enum):\n  RED = 1\nred = Colour.RED",
        "red is Colour.RED",
        True,
    ),
    "inheritance": (
        ("class A:\n  def who(self): return 'a'\nclass B(A):\n  def who(self): "
        "return super().who() + 'b'\nb = B()"),
        "(b.who(), isinstance(b, A), type(b) is B)",
        ("ab", True, True),
    ),
    "methods": (
        ("class C:\n  n = 1\n  @classmethod\n  def make(cls): return cls()\n  @staticmethod\n"
        "  def two(): return 2\n  @property\n  def three(self): return 3\nm = C().make"),
        "(m().n, C.two(), C.make().three)",
        (1, 2, 3),
    ),
    "namedtuple": (
        "import collections\nP = collections.namedtuple('P', 'x y')\np = P(1, 2)",
        "(p.y, type(p) is P)",
        (2, True),
    ),
    "generic": (
        ("import typing\nT = typing.TypeVar('T')\nclass Box(typing.Generic[T]):\n"
        "  def __init__(self, v): self.v = v\nb = Box[int](3)"),
        "(b.v, isinstance(b, Box))",
        (3, True),
    ),
    "abstract": (
        ("import abc\nclass A(abc.ABC):\n  @abc.abstractmethod\n  def f(self): ...\nclass B(A):\n"
        "  def f(self): return 1\nb = B()"),
        "b.f()",
        1,
    ),
    "coroutine function": (
        "import asyncio\nasync def f(): await asyncio.sleep(0); return 9",
        "asyncio.run(f())",
        9,
    ),
    "exception": ("class Bad(ValueError): pass\nbad = Bad('x')", "(type(bad) is Bad, bad.args)",
                  (True, ("x",))),
    "partial": ("import functools\ndef f(a, b): return a - b\ng = functools.partial(f, b=1)",
                "g(5)", 4),
    "cycle": ("class N: pass\na, b = N(), N()\na.o, b.o = b, a", "a.o.o is a and b.o is a", True),
    "read-only dict": ("import types\nd = types.MappingProxyType({'a': 1})", "d['a']", 1),
    "array": (
        "import numpy as np\na = np.arange(90_000.); b = a[:10]\na[3] = 7",
        "(a.sum(), b[3], a.flags.writeable)",
        (4_049_955_004.0, 7.0, True),
    ),
    "arrays of other orders": (
        ("import numpy as np\na = np.asfortranarray(np.arange(90_000).reshape(300, 300))\n"
        "b = a[::2, ::3]\nc = np.array(5)\nd = np.array(['x', None], object)"),
        "(a[1, 2], b[1, 1], int(c), d.tolist(), a.flags.f_contiguous)",
        (302, 603, 5, ["x", None], True),
    ),
    "module": ("import math as m, os.path", "(m.floor(1.5), os.path.join('a', 'b'))", (1, "a/b")),
}  # fmt: skip


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_a_definition_works_in_another_child(kind: str) -> None:
    source, question, answer = DEFINITIONS[kind]
    child = moved(source)
    assert child.value(question) == answer
    again, _ = saved(child.module.__dict__)
    other = Child()
    assert other.restore(again).lost == {}
    assert other.value(question) == answer


def test_a_restored_function_sees_later_assignments_and_makes_them() -> None:
    child = moved("n = 1\ndef get(): return n\ndef up():\n  global n\n  n += 1")
    child.run("n = 5\nup()")
    assert child.value("get()") == 6
    child = moved("class C:\n  def get(self): return n\nc = C()\nn = 1")
    child.run("n = 7")
    assert child.value("c.get()") == 7


def test_a_function_is_saved_although_a_global_that_it_uses_cannot_be() -> None:
    source = "import threading\nlock = threading.Lock()\ndef f():\n  with lock: return 1"
    pieces, about = saved(namespace_of(source))
    assert set(about.skipped) == {"lock"}
    assert "cannot pickle" in about.skipped["lock"]
    child = Child("import threading\nlock = threading.Lock()")
    assert child.restore(pieces).lost == {}
    assert child.value("f()") == 1


def test_a_function_brings_no_old_values_of_globals_along() -> None:
    pieces, _ = saved(namespace_of("n = 1\ndef f(): return n"))
    namespace = namespace_of("def f(): return n\nn = 1")
    del namespace["n"]
    pieces, _ = saved(namespace)
    child = Child("n = 'mine'")
    child.restore(pieces)
    assert child.value("f()") == "mine"


def test_submodules_that_were_imported_are_imported_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = (
        "import xml.etree.ElementTree\ndef f(): return xml.etree.ElementTree.fromstring('<a/>').tag"
    )
    pieces, _ = saved(namespace_of(source))
    for name in [name for name in sys.modules if name.split(".")[0] == "xml"]:
        monkeypatch.delitem(sys.modules, name)
    child = Child()
    child.restore(pieces)
    assert child.value("f()") == "a"


def test_versions_of_python_and_of_packages_in_use_are_recorded() -> None:
    numpy = metadata.version("numpy")
    for source in (
        "import numpy as np",
        "from numpy import int64 as x",
        "import numpy\nx = numpy.ones(3)\ndel numpy",
    ):
        _, about = saved(namespace_of(source))
        assert about.python == ".".join(map(str, sys.version_info[:3]))
        assert about.packages == {"numpy": numpy}
    assert saved(namespace_of("import json; x = 1"))[1].packages == {}


def test_a_package_under_another_name_than_its_module_says_its_version_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = ModuleType("odd_name")
    module.__version__ = "4.2"
    monkeypatch.setitem(sys.modules, "odd_name", module)
    _, about = saved(namespace_of("import odd_name"))
    assert about.packages == {"odd_name": "4.2"}


def test_names_with_odd_characters_come_back() -> None:
    namespace = namespace_of("")
    namespace["odd \ud800"] = 1
    namespace["#0"] = "#1"
    pieces, about = saved(namespace)
    assert about.names == ("#0", "odd \\ud800")
    child = Child()
    assert child.restore(pieces).names == ("#0", "odd \\ud800")
    assert child.module.__dict__["odd \ud800"] == 1
