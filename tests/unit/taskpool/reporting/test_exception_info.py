"""A failure is reported to Celery even if its exception cannot be made again."""

from __future__ import annotations

from typing import Self

from celery.utils.serialization import get_pickled_exception

from capsule_tasks.protocol.messages import Failure
from capsule_tasks.taskpool.reporting.exception_info import rebuild, rebuild_info


class Picky(Exception):
    """Cannot be made from the arguments that it keeps."""

    def __new__(cls, *args: object) -> Self:
        raise TypeError(f"not from {args!r}")


def test_celery_can_unwrap_an_exception_that_no_pickle_carries() -> None:
    wrapped = ["shop", "OwnError", ("code 3", "look"), "OwnError('code 3', 'look')"]
    error = rebuild(
        Failure(
            module="celery.utils.serialization",
            name="UnpickleableExceptionWrapper",
            args=wrapped,
            message="OwnError('code 3', 'look')",
        )
    )
    assert repr(get_pickled_exception(error)) == "OwnError('code 3', 'look')"
    assert str(error) == "OwnError('code 3', 'look')"


def test_a_type_that_refuses_to_be_made_is_replaced_by_one_of_its_name() -> None:
    info = rebuild_info(
        Failure(module=__name__, name="Picky", args=["x"], message="why", traceback="where")
    )
    assert type(info.exception).__name__ == "Picky"
    assert str(info.exception) == "why"
    assert info.traceback == "where"


class Constructed(Exception):
    """Speaks only of what its constructor has set."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.kind = "network"

    def __repr__(self) -> str:
        return f"{self.kind}:Constructed"


def test_an_exception_type_without_a_text_unless_constructed_is_replaced_too() -> None:
    """No constructor runs here, and Celery's log of the failure is its `repr`."""
    error = rebuild(Failure(module=__name__, name="Constructed", args=["x"], message="why"))
    assert repr(error) == "Constructed('why')"
    assert repr(Constructed("x")) == "network:Constructed"
