"""A wrong setting of the pool is said before anything starts."""

from __future__ import annotations

import pytest
from celery import Celery

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.taskpool.options import check


def test_a_name_that_nobody_knows_is_told(caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("shop")
    app.conf.update(capsule_ready=5, capsule_revoke_s=10, capsule_streams=False)
    check(app)
    assert caplog.messages == [
        "there is no setting capsule_ready; did you mean capsule_ready_s?",
    ]


def test_a_value_that_cannot_be_is_refused() -> None:
    app = Celery("shop")
    app.conf.update(capsule_async_children=0)
    with pytest.raises(InvalidSetting, match="capsule_async_children = 0"):
        check(app)
