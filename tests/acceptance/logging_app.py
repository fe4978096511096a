"""An app that sets up logging in one of the ways that applications do, chosen by `TEST_LOGGING`."""

from __future__ import annotations

import logging
import logging.config
import logging.handlers
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from celery import Task, signals
from celery.utils.log import get_task_logger

from tests.acceptance.app import app, mark

__all__ = ["app"]

FORMAT = "%(correlation)s|%(levelname)s|%(message)s"
HOW = os.environ.get("TEST_LOGGING", "")
log = get_task_logger(__name__)


class Correlated(logging.Filter):
    """The attributes that the formatter relies on."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.correlation = f"correlation-{os.getpid()}"
        return True


def log_by_dict(**_: Any) -> None:
    handler = {
        "class": "logging.StreamHandler",
        "stream": "ext://sys.stderr",
        "filters": ["correlated"],
        "formatter": "correlating",
    }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"correlated": {"()": Correlated}},
            "formatters": {"correlating": {"format": FORMAT}},
            "handlers": {"console": handler},
            "root": {"level": "INFO", "handlers": ["console"]},
        }
    )


def add_filters(logger: logging.Logger, **_: Any) -> None:
    for handler in logger.handlers:
        handler.addFilter(Correlated())
        handler.setFormatter(logging.Formatter(FORMAT))


class Printing(logging.Handler):
    """Finds the stream when it emits, as handlers with a console do."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"printing|{self.format(record)}\n")


def add_handlers(logger: logging.Logger, **_: Any) -> None:
    broken = logging.StreamHandler()
    broken.setFormatter(logging.Formatter(FORMAT))
    target = logging.StreamHandler()
    target.setFormatter(logging.Formatter("memory|%(message)s"))
    for handler in (broken, logging.handlers.MemoryHandler(1, target=target), Printing()):
        logger.addHandler(handler)


if HOW == "dictConfig":
    signals.setup_logging.connect(log_by_dict)
elif HOW == "after_setup":
    signals.after_setup_logger.connect(add_filters)
    signals.after_setup_task_logger.connect(add_filters)
elif HOW == "terminal":

    @signals.celeryd_init.connect
    def be_at_a_terminal(**_: Any) -> None:
        sys.stderr.isatty = lambda: True  # type: ignore[method-assign]

elif HOW == "handlers":
    signals.after_setup_logger.connect(add_handlers)
elif HOW == "opened":
    DIRECTORY = Path(os.environ["TEST_DIRECTORY"])
    audit = (DIRECTORY / "audit").open("a", buffering=1)
    queue: Any = multiprocessing.Queue()
    log.addHandler(logging.StreamHandler((DIRECTORY / "stream").open("a")))
    log.addHandler(logging.handlers.QueueHandler(queue))

    @signals.worker_init.connect
    def listen(**_: Any) -> None:
        handler = logging.FileHandler(DIRECTORY / "queue")
        logging.handlers.QueueListener(queue, handler).start()
        log.warning("the worker is there")


class Returning(Task):  # type: ignore[misc]
    def after_return(self, status: str, _value: Any, task_id: str, *_: Any) -> None:
        mark(f"returned:{task_id}", status)


@app.task(name="say", base=Returning)
def say(word: str) -> int:
    log.info("said %s", word)
    if HOW == "opened":
        audit.write(f"said {word}\n")
    return os.getpid()


@app.task(name="then")
def then(value: int, key: str) -> None:
    mark(key, value)
