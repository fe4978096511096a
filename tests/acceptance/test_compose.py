"""The services of `compose/`, each started as its file says, without Docker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from capsule_tasks.testing.servers import find_server, free_port
from tests.acceptance.workers import HANG_S, ROOT, eventually

PORTS = {"6379": "redis", "5555": "flower"}
"""Ports in the file; each is replaced by a free one."""

WORKERS = ("worker", "sessions")
ASK = """
from workers.app import capsule
from workers.pipeline import report

print(report.delay(7, "n").get(timeout=60))
print(capsule.execute("6 * 7").get(timeout=60))
session = capsule.session("someone")
session.execute("n = 1").get(timeout=60)
print(session.execute("n + 1").get(timeout=60))
"""


class Services:
    """The services of the file, in an environment like that of containers."""

    def __init__(self, directory: Path) -> None:
        text = (ROOT / "compose/compose.yaml").read_text()
        self._services: dict[str, Any] = yaml.safe_load(text)["services"]
        self._directory = directory
        self.ports = {name: free_port() for name in PORTS.values()}
        url = f"redis://127.0.0.1:{self.ports['redis']}/0"
        self.environment = {
            **os.environ,
            "CAPSULE_BROKER_URL": url,
            "CAPSULE_RESULT_URL": url,
            "HOSTNAME": socket.gethostname(),
            "PATH": f"{self._programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def _programs(self) -> Path:
        """Valkey's, under their names; the client knows of the port, which is another here."""
        folder = self._directory / "programs"
        folder.mkdir()
        (folder / "valkey-server").symlink_to(find_server(None))
        ask = f"import redis, sys; print(redis.Redis(port={self.ports['redis']})"
        ask += ".execute_command(*sys.argv[1:]))"
        client = folder / "valkey-cli"
        client.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{ask}' \"$@\"\n")
        client.chmod(0o755)
        return folder

    def command_of(self, service: str) -> list[str]:
        """The command of a service, with the paths and ports of this test."""
        places = {
            "/etc/redis.conf": str(ROOT / "compose/redis.conf"),
            "/data": str(self._directory),
        }
        command = [places.get(word, word) for word in self._services[service]["command"]]
        if service == "redis":
            command += ["--port", str(self.ports["redis"]), "--bind", "127.0.0.1"]
        return [self._with_ports(word) for word in command]

    def environment_of(self, service: str) -> dict[str, str]:
        """The environment of a service, with the addresses of this test."""
        return {**self._services[service].get("environment", {}), **self.environment}

    def check(self, service: str) -> bool:
        """The health check of a service, as its container would run it."""
        kind, *command = self._services[service]["healthcheck"]["test"]
        if kind == "CMD-SHELL":
            command = ["sh", "-c", *command]
        command = [self._with_ports(word.replace("$$", "$")) for word in command]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment_of(service),
            timeout=HANG_S,
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    def _with_ports(self, word: str) -> str:
        for port, service in PORTS.items():
            word = word.replace(port, str(self.ports[service]))
        return word


def test_the_services_start_are_healthy_and_a_task_runs_through_them(tmp_path: Path) -> None:
    services = Services(tmp_path)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for service in ("redis", *WORKERS, "flower"):
            if service not in WORKERS:  # whose check waits long for an answer
                assert not services.check(service), f"{service} is not there yet"
            log = tmp_path / f"{service}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    services.command_of(service),
                    cwd=ROOT,
                    env=services.environment_of(service),
                    stdout=file,
                    stderr=file,
                )
            running.append(process)
            if service in WORKERS:
                eventually(lambda log=log: b" ready." in log.read_bytes(), service)
            eventually(lambda one=service: services.check(one), f"a healthy {service}")
        said = subprocess.run(
            [sys.executable, "-c", ASK],
            cwd=ROOT,
            env=services.environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=2 * HANG_S,
        )
        assert said.stdout.split("\n") == ["n: 7", "42", "2", ""]
        hosts = (tmp_path / "sessions.log").read_text()
        assert "capsule.execute" in hosts, "code runs in the role for code"
    finally:
        for process in reversed(running):
            process.terminate()
        for process in reversed(running):
            try:
                process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_the_build_context_of_the_image_has_only_its_parts() -> None:
    """Docker reads `.dockerignore` at the root of the context; its last fitting line counts."""
    services = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())["services"]
    for service in (*WORKERS, "flower"):
        assert services[service]["build"] == {
            "context": "..",
            "dockerfile": "compose/Dockerfile",
        }
    lines = [line.split() for line in (ROOT / "compose/Dockerfile").read_text().splitlines()]
    copied = {
        source.rstrip("/")
        for words in lines
        if words[:1] == ["COPY"] and not words[1].startswith("--")
        for source in words[1:-1]
    }
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)
