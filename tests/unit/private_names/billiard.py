"""The undocumented names of billiard that we use."""

from __future__ import annotations

from tests.unit.private_names.entries import names

BILLIARD = (
    names(
        "billiard.process",
        "a child has no share in the processes of the worker that it was forked from",
        _children="set",
        current_process="()",
    ),
    names(
        "billiard.process:BaseProcess",
        "the name of a child in log lines",
        _name="= name or type(self).__name__ + '-' + ':'.join((str(i) for i in self._identity))",
    ),
    names(
        "billiard.util",
        "what a pool process does after a fork, and when it ends",
        _run_after_forkers="()",
        _run_finalizers="(minpriority=None)",
    ),
    names(
        "billiard.einfo:ExceptionInfo",
        "made without its constructor, from what a child reports",
        type="NoneType",
        exception="= ExceptionWithTraceback(…",
        tb="= Traceback(tb)",
        traceback="= ''.join(…",
        internal="bool",
    ),
    names(
        "billiard.einfo:ExceptionWithTraceback",
        "Celery expects exceptions so",
        __init__="(self, exc, tb)",
    ),
    names("billiard.einfo:RemoteTraceback", "the same", __init__="(self, tb)"),
)
