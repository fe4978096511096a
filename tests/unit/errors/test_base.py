"""The text of an error, and of an error without one."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from capsule_tasks import errors
from capsule_tasks.errors import reason_of

_OWN = {
    name: kind
    for module in pkgutil.iter_modules(errors.__path__, f"{errors.__name__}.")
    for name, kind in vars(importlib.import_module(module.name)).items()
    if isinstance(kind, type) and issubclass(kind, errors.CapsuleError)
}
"""Errors that always have a text."""


def test_an_error_without_a_text_has_its_type() -> None:
    assert reason_of(TimeoutError()) == "TimeoutError"
    assert reason_of(ValueError("x")) == "x"


@pytest.mark.parametrize("kind", _OWN.values())
def test_an_error_of_ours_always_has_a_text(kind: type[errors.CapsuleError]) -> None:
    try:
        error = kind("")
    except TypeError:
        return  # it has a sentence of its own, made from more parts
    assert str(error).strip()
    assert not str(error).startswith(" ")


def test_an_error_of_ours_keeps_its_text() -> None:
    assert str(errors.SessionLost("the child is gone")) == "the child is gone"
    assert str(errors.SessionLost()) == "SessionLost"
    assert str(errors.StorageFull("")) == "StorageFull (nothing was written)"
