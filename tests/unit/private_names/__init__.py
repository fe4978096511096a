"""The undocumented names of other packages that we use: each name, its shape, and its use.

Private names, and names that we override, replace or rely on although their package may change them
in any minor release. pyproject.toml pins these packages to a minor for that reason.
`tests/unit/test_private_names.py` finds names that have moved, and uses that are not listed here.

A shape is a signature without annotations, `(… a, b)` for one with these parameters among others,
`= value` for what an attribute is set to, and else a type. `…` at its end stands for any end.
"""

from __future__ import annotations

from tests.unit.private_names.billiard import BILLIARD
from tests.unit.private_names.celery import CELERY
from tests.unit.private_names.kombu import KOMBU
from tests.unit.private_names.openai_agents import OPENAI_AGENTS
from tests.unit.private_names.redis import REDIS
from tests.unit.private_names.standard_library import STANDARD_LIBRARY

NAMES = (*CELERY, *KOMBU, *BILLIARD, *REDIS, *OPENAI_AGENTS, *STANDARD_LIBRARY)

__all__ = ["NAMES"]
