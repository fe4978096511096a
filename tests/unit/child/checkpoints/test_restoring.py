"""Names that cannot come back are reported, and all others come back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from capsule_tasks.child.checkpoints.index import NotSaved, index_of, packed
from capsule_tasks.child.checkpoints.pieces import PieceReader
from tests.unit.child.checkpoints.namespaces import Child, namespace_of, saved


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that is installed where the namespace was saved."""
    module: Any = ModuleType("plugin")
    source = (
        "class Model:\n"
        "  def __init__(self, weights): self.weights = weights\n"
        "def helper(): return 1\n"
        "class Changed:\n"
        "  def __init__(self): self.a = 1\n"
    )
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "plugin", module)
    return module


def without_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plugin", None)


SOURCE = """\
import plugin, math
first = [1]
shared = ['shared']
model = plugin.Model(shared)
after = shared
def f(x): return x + 1
def g(): return plugin.helper()
class Point:
    def __init__(self, x): self.x = x
p = Point(2)
models = {'one': model}
both = (p, plugin.Model(3))
last = Point(first)
helper = plugin.helper
kind = plugin.Model
class Own(plugin.Model): pass
text = 'plain'
numbers = {'weights': 1}
"""


def test_names_of_a_module_that_is_not_installed_are_lost_and_the_others_come_back(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, about = saved(namespace_of(SOURCE))
    assert about.skipped == {}
    without_plugin(monkeypatch)
    child = Child()
    restored = child.restore(pieces)
    assert set(restored.lost) == {"plugin", "model", "models", "both", "helper", "kind", "Own"}
    assert "ModuleNotFoundError" in restored.lost["plugin"]
    assert "plugin" in restored.lost["model"]
    assert restored.lost["models"] == "it shares an object with 'model', which is lost"
    assert set(restored.names) == set(about.names) - set(restored.lost)
    assert child.value("(first, shared, after is shared, f(1), p.x, last.x is first)") == (
        [1], ["shared"], True, 2, 2, True,
    )  # fmt: skip
    assert child.value("(type(last) is Point, text, numbers)") == (True, "plain", {"weights": 1})
    with pytest.raises(NameError, match="plugin"):
        child.value("g()")


def test_a_class_that_has_changed_costs_only_what_needs_it(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import plugin\nold = plugin.Changed()\nolds = [plugin.Changed()]\n"
        "b = 2\nclass C: pass\nc = C()"
    )
    pieces, _ = saved(namespace_of(source))

    class Changed:
        __slots__ = ("b",)

    plugin.Changed = Changed
    child = Child()
    restored = child.restore(pieces)
    assert set(restored.lost) == {"old", "olds"}
    assert "AttributeError" in restored.lost["old"]
    assert child.value("(b, type(c) is C, plugin.helper())") == (2, True, 1)
    del plugin.Changed
    assert set(Child().restore(pieces).lost) == {"old", "olds"}


def test_functions_after_a_lost_function_come_back(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each function is made with is in the pickle of the first one."""
    source = "import plugin\ndef bad(x=plugin.Model(1)): return x\n" + "".join(
        f"def f{n}(x={n}): return x\nclass C{n}:\n  n = {n}\n" for n in range(20)
    )
    pieces, _ = saved(namespace_of(source))
    without_plugin(monkeypatch)
    child = Child()
    assert set(child.restore(pieces).lost) == {"plugin", "bad"}
    assert child.value("[f0(), f19(), C0.n, C19().n]") == [0, 19, 0, 19]


@pytest.mark.parametrize("lost_at", [0, 1, 5, 9])
def test_sharing_is_right_after_any_lost_name(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, lost_at: int
) -> None:
    lines = [f"x{n} = [{n}]; y{n} = (x{n}, 'same text', {{'k': x{n}}})" for n in range(10)]
    lines[lost_at] = (
        f"x{lost_at} = plugin.Model([0, 'same text']); y{lost_at} = {{'m': x{lost_at}}}"
    )
    pieces, _ = saved(namespace_of("import plugin\n" + "\n".join(lines)))
    without_plugin(monkeypatch)
    child = Child()
    assert set(child.restore(pieces).lost) == {"plugin", f"x{lost_at}", f"y{lost_at}"}
    for n in set(range(10)) - {lost_at}:
        assert child.value(f"(x{n}, y{n}[0] is x{n}, y{n}[1], y{n}[2]['k'] is x{n})") == (
            [n], True, "same text", True,
        )  # fmt: skip


def test_a_name_whose_restore_raises_is_lost() -> None:
    source = (
        "class Fails:\n  def __reduce__(self): return (int, ('no number',))\n"
        "a = 1\nfails = Fails()\nz = 2"
    )
    pieces, _ = saved(namespace_of(source))
    child = Child("fails = 'mine'")
    restored = child.restore(pieces)
    assert set(restored.lost) == {"fails"}
    assert restored.lost["fails"].startswith("ValueError: invalid literal")
    assert child.value("(a, z, fails)") == (1, 2, "mine")


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "MemoryError", "SystemExit"])
def test_a_stop_and_too_little_memory_fail_the_restore_as_a_whole(error: str) -> None:
    source = (
        f"def stop(): raise {error}\nclass S:\n  def __reduce__(self): return (stop, ())\n"
        "a = 1\ns = S()"
    )
    pieces, _ = saved(namespace_of(source))
    child = Child("a = 'mine'; b = 2")
    before = dict(child.module.__dict__)
    for mode in ("merge", "replace"):
        with pytest.raises(BaseException, match=r"^$") as raised:
            child.restore(pieces, mode)
        assert type(raised.value).__name__ == error
        assert child.module.__dict__ == before


@pytest.mark.parametrize("data", [b"", b"capsule2", b"\xff\xff\xff\xffcapsule2", b"x" * 100])
def test_bytes_that_are_no_checkpoint_are_refused(data: bytes) -> None:
    with pytest.raises(NotSaved, match="is not a"):
        Child().restore([data])


def made_by(pieces: list[bytes], **changes: Any) -> list[bytes]:
    """The same checkpoint, as another Python or other packages would have made it."""
    reader = PieceReader(list(pieces))
    index = index_of(reader)
    end = len(packed(index))
    data = b"".join(pieces)[:-end]
    return [data + packed(msgspec.structs.replace(index, **changes))]


def test_other_versions_are_reported() -> None:
    pieces, _ = saved(namespace_of("import numpy\nx = 1"))
    here = ".".join(map(str, sys.version_info[:3]))
    (numpy,) = saved(namespace_of("import numpy"))[1].packages.values()
    other = made_by(pieces, packages={"numpy": "1.0", "nowhere": "2.0"})
    restored = Child().restore(other)
    assert restored.differences == {
        "numpy": f"saved under 1.0, here {numpy}",
        "nowhere": "saved under 2.0, here not installed",
    }
    assert restored.lost == {}
    patch = f"{sys.version_info[0]}.{sys.version_info[1]}.99"
    restored = Child().restore(made_by(pieces, python=patch))
    assert restored.differences == {"python": f"saved under {patch}, here {here}"}


def test_bytecode_of_another_python_is_not_run() -> None:
    source = "def f(): return 1\nclass C:\n  def m(self): ...\nc = C()\nclass Plain: n = 1\nx = [1]"
    pieces, _ = saved(namespace_of(source))
    child = Child()
    restored = child.restore(made_by(pieces, python="3.6.1"))
    assert set(restored.lost) == {"f", "C", "c"}
    assert "compiled by Python 3.6.1; Python 3." in restored.lost["f"]
    assert child.value("(Plain.n, x)") == (1, [1])
    assert restored.differences["python"].startswith("saved under 3.6.1, here 3.")


def test_a_module_next_to_the_code_is_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_code.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    namespace = namespace_of("import beside_the_code as b")
    pieces, _ = saved(namespace)
    monkeypatch.delitem(sys.modules, "beside_the_code")
    child = Child()
    assert child.restore(pieces).lost == {}
    assert child.value("b.value") == 3
