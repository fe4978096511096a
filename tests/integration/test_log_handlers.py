"""Log handlers in a copy of a process whose descriptors are those of its original no more."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler, SysLogHandler, WatchedFileHandler
from pathlib import Path

import pytest

from capsule_tasks.child.executors.celery_app import reopen_handlers


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("of a test")
    logger.propagate = False
    yield logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def lose(number: int) -> None:
    """As a copy does with whatever its original had open."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, number)
    os.close(null)


@pytest.mark.parametrize("kind", [logging.FileHandler, RotatingFileHandler, WatchedFileHandler])
def test_a_file_that_a_copy_opens_is_not_emptied(
    logger: logging.Logger, tmp_path: Path, kind: type[logging.FileHandler]
) -> None:
    path = tmp_path / "log"
    logger.addHandler(kind(path, "w", delay=True))
    path.write_text("of another copy\n")
    reopen_handlers()
    logger.warning("after")
    assert path.read_text() == "of another copy\nafter\n"


def test_a_system_log_is_connected_again(logger: logging.Logger, tmp_path: Path) -> None:
    address = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(address)
        handler = SysLogHandler(address)
        logger.addHandler(handler)
        lose(handler.socket.fileno())
        reopen_handlers()
        logger.warning("after")
        server.settimeout(10)
        assert b"after" in server.recv(1024)
