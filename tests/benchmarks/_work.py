"""The work, spelled once: a session, a bare child and a Jupyter kernel are given the same."""

from __future__ import annotations

LINES = 100_000
LINE_BYTES = 100
LINES_BYTES = LINES * LINE_BYTES
PRINT_LINES = f"line = 'x' * {LINE_BYTES - 1}\nfor _ in range({LINES}):\n    print(line)\n"

WRITE_BYTES = 64 * 1024 * 1024
PREPARE_WRITE = f"import sys\ndata = 'x' * {WRITE_BYTES}\n"
WRITE_AT_ONCE = "sys.stdout.write(data)\nsys.stdout.flush()\n"

RUNNING = "running"
"""Printed first by what is to be stopped, so that it is known to run."""
BUSY_LOOP = f"print({RUNNING!r})\nwhile True: pass\n"
SLEEP = f"import time\nprint({RUNNING!r})\ntime.sleep(60)\n"
FLOOD = f"print({RUNNING!r})\nwhile True: print('{'x' * (LINE_BYTES - 1)}')\n"
FLOOD_BYTES = 1024 * 1024
"""A flood is stopped once so much of it has been read."""

PEAK_KIB = "import resource\nresource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
PICKLE_ARRAY = """
import pickle, time
begun = time.perf_counter(); data = pickle.dumps(array, 5); dumped = time.perf_counter()
pickle.loads(data); loaded = time.perf_counter()
del data
(dumped - begun, loaded - dumped)
"""
