"""An app whose worker reads its CPU quota from the directory that a test has written."""

from __future__ import annotations

import os
from pathlib import Path

from celery.utils import sysinfo

from tests.acceptance.app import app

HOST = Path(os.environ["TEST_CGROUPS"])

sysinfo.CGROUP_ROOT = str(HOST)
sysinfo.PROC_SELF_CGROUP = str(HOST / "of_this_process")

__all__ = ["app"]
