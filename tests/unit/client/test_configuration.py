"""Settings that are derived from those of the app."""

from __future__ import annotations

import pytest
from celery import Celery

from capsule_tasks.client.configuration import named_session_settings

DAY_S = 86400.0


@pytest.mark.parametrize(
    ("result_expires", "known_days"),
    [(60, 1), (5 * DAY_S, 5), (60 * DAY_S, 60), (None, 30), (0, 30)],
)
def test_ids_of_calls_are_known_as_long_as_their_results(
    result_expires: float | None, known_days: int
) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.result_expires = result_expires
    settings = named_session_settings(app)
    assert settings.known_ttl_s == known_days * DAY_S
    assert settings.ttl_s == max(30, known_days) * DAY_S


def test_ids_of_calls_are_known_as_long_as_their_message_may_be_delivered_again() -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.result_expires = 60
    app.conf.broker_transport_options = {"visibility_timeout": 3 * DAY_S}
    assert named_session_settings(app).known_ttl_s == 3 * DAY_S
