"""Hypothesis for tests on a loaded machine: examples are counted, never timed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "capsule", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("capsule")
