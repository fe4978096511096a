"""Settings that the environment of a process carries."""

import os


def is_portable_wanted() -> bool:
    """Whether the environment asks to do without what only Linux has; children inherit it."""
    return os.environ.get("CAPSULE_PORTABLE", "") not in ("", "0")


def redis_url_of_environment() -> str | None:
    """The Redis that the environment names for what this package stores."""
    return os.environ.get("CAPSULE_REDIS_URL") or None


def scrubbed_environment() -> dict[str, str]:
    """An environment that holds no secret of this process."""
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
