"""The services of `compose/`, each started as its file says, without Docker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from scripts._redis_server import find_server, free_port
from tests.acceptance.workers import HANG_S, ROOT, eventually


def command_of(service: str) -> list[str]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
    command: list[str] = services["services"][service]["command"]
    return command


def health_of(service: str) -> list[str]:
    """The check of a service, as its container would run it in a shell."""
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
    _, command = services["services"][service]["healthcheck"]["test"]
    return ["sh", "-c", command.replace("$$", "$")]


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


def test_the_services_start_and_a_task_runs_through_them(tmp_path: Path) -> None:
    port, flower_port = free_port(), free_port()
    url = f"redis://127.0.0.1:{port}/0"
    environment = {
        **os.environ,
        "CAPSULE_BROKER_URL": url,
        "CAPSULE_RESULT_URL": url,
        "HOSTNAME": socket.gethostname(),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    _, _, *options = command_of("redis")
    options[-1] = str(tmp_path)
    binary = str(find_server(None))
    configuration = str(ROOT / "compose/redis.conf")
    celery = [sys.executable, "-m"]
    flower = [*command_of("flower")[:-1], f"--port={flower_port}"]
    commands = [
        [binary, configuration, *options, "--port", str(port), "--bind", "127.0.0.1"],
        [*celery, *command_of("worker"), "-c", "1"],
        [*celery, *flower],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        with (tmp_path / "log").open("wb") as log:
            for command in commands:
                running.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
                )
                eventually(lambda: answers(port), "the server")
        ask = "from workers.pipeline import report; print(report.delay(7, 'n').get(timeout=60))"
        said = subprocess.run(
            [sys.executable, "-c", ask],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=2 * HANG_S,
        )
        assert said.stdout.strip() == "n: 7"
        subprocess.run(health_of("worker"), cwd=ROOT, env=environment, check=True, timeout=HANG_S)
        eventually(lambda: answers(flower_port), "Flower")
        page = f"http://127.0.0.1:{flower_port}/healthcheck"
        with urllib.request.urlopen(page, timeout=HANG_S) as answer:
            assert answer.status == 200
    finally:
        for process in reversed(running):
            process.terminate()
        for process in reversed(running):
            try:
                process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
