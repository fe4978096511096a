"""The undocumented names of the standard library that we use."""

from __future__ import annotations

from tests.unit.private_names.entries import names

STANDARD_LIBRARY = (
    names("asyncio", "a loop that another loop's thread runs", _set_running_loop="builtin"),
    names(
        "asyncio.base_events:BaseEventLoop",
        "whether such a loop has work left",
        _ready="= collections.deque()",
        _scheduled="= []",
    ),
    names(
        "asyncio.selector_events:BaseSelectorEventLoop",
        "closed in forked copies",
        _selector="= selector",
    ),
    names(
        "atexit",
        "the functions of the worker are not run in a child; those of a child before it exits",
        _clear="builtin",
        _run_exitfuncs="builtin",
    ),
    names("argparse", "the type of a parser's sub-commands", _SubParsersAction="class"),
    names("logging", "every handler, to give it a stream of the child", _handlerList="list"),
    names(
        "multiprocessing.process",
        "a child has no share in the processes of the worker that it was forked from",
        _children="set",
    ),
    names(
        "multiprocessing.process:BaseProcess",
        "the name of a child in log lines",
        _name="= name or type(self).__name__ + '-' + ':'.join((str(i) for i in self._identity))",
    ),
    names("signal", "its functions without the enums around them", _signal="module"),
    names(
        "subprocess:Popen", "a cancel does not wait for a subprocess", _sigint_wait_secs="= 0.25"
    ),
)
