"""Code that a storm runs: well behaved, endless, stubborn, and hostile."""

from __future__ import annotations

STOPPABLE = {
    "sleep": "import time\ntime.sleep(300)",
    "loop": "while True: pass",
    "input": "input('name? ')",
    "flood": "while True: print('x' * 99)",
    "stderr": "import sys\nwhile True: print('e' * 50, file=sys.stderr), print('o' * 50)",
    "raw": "import os\nwhile True: os.write(1, b'r' * 999)",
    "recursion": "def f(n):\n    try: f(n + 1)\n    finally: f(n + 1)\nf(0)",
    "socket": "import socket\na, b = socket.socketpair()\na.recv(1)",
    "subprocess": "import subprocess\nsubprocess.run(['sleep', '300'])",
    "finally": (
        "import time\ntry: time.sleep(300)\nfinally: print('f' * 200_000), print('cleaned up')"
    ),
    "threads": (
        "import threading, time\n"
        "def talk():\n"
        "    for i in range(200): print('thread', i), time.sleep(0.001)\n"
        "threads = [threading.Thread(target=talk, daemon=True) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "time.sleep(300)"
    ),
    "await": "import asyncio\nawait asyncio.sleep(300)",
    "await flood": "import asyncio\nwhile True: print('y' * 99), await asyncio.sleep(0)",
    "await finally": (
        "import asyncio\n"
        "try: await asyncio.sleep(300)\n"
        "finally: print('z' * 200_000), await asyncio.sleep(0.001)"
    ),
    "await loop": "import asyncio\nawait asyncio.sleep(0.01)\nwhile True: pass",
    "await input": "import asyncio\nawait asyncio.to_thread(input, 'name? ')",
}
"""Never end by themselves; the first signal or `task.cancel()` stops them."""

COROUTINES = tuple(name for name in STOPPABLE if name.startswith("await"))

STUBBORN = {
    "swallows": (
        "print('begun')\nwhile True:\n  try:\n    while True: pass\n  except BaseException: pass"
    ),
    "holds the GIL": "sum(range(10 ** 12))",
    "system": "import os\nos.system('sleep 300')",
    "stops itself": "import os\nos.kill(os.getpid(), 19)",
    "await ignores": (
        "import asyncio\n"
        "print('begun')\n"
        "while True:\n"
        "  try: await asyncio.sleep(300)\n"
        "  except BaseException: pass"
    ),
    "await blocks": "while True:\n  try: await __import__('asyncio').sleep(0)\n  except: pass",
    "await GIL": "import asyncio\nawait asyncio.sleep(0.01)\nsum(range(10 ** 12))",
}
"""End by force only."""

FINITE = {
    "value": "6 * 7",
    "raises": "1 / 0",
    "exits": "import sys\nsys.exit(3)",
    "speaks": "for i in range(300): print('line', i)",
    "big": "print('b' * 2_000_000)",
    "result": "['r' * 100_000] * 10",
    "naps": "import time\ntime.sleep(0.01)\nprint('rested')",
    "raw once": "import os\nos.write(2, b'w' * 50_000) and None",
    "child": "import subprocess\nsubprocess.run(['echo', 'hi'])",
    "await value": "import asyncio\nawait asyncio.sleep(0.01)\n42",
    "await raises": "import asyncio\nawait asyncio.sleep(0)\n1 / 0",
    "syntax": "def def",
    "late": (
        "import threading, time\n"
        "def late(): time.sleep(0.05), print('too late' * 100)\n"
        "threading.Thread(target=late).start()"
    ),
}

DEADLY = {
    "_exit": "import os\nos._exit(5)",
    "kills itself": "import os\nprint('bye'), os.kill(os.getpid(), 9)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "aborts": "import os\nos.abort()",
    "_exit from a thread": (
        "import os, threading, time\n"
        "threading.Timer(0.005, os._exit, [6]).start()\n"
        "while True: print('still here')"
    ),
    "await _exit": "import asyncio, os\nawait asyncio.sleep(0.005)\nos._exit(7)",
    "memory": "import os, signal\nx = bytearray(50_000_000)\nos.kill(os.getpid(), signal.SIGKILL)",
    "closes all": "import os, time\nos.closerange(3, 65_536)\ntime.sleep(300)",
    "closes all and returns": "import os\nos.closerange(0, 65_536)",
    "closes sockets": (
        "import os, stat, time\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        if stat.S_ISSOCK(os.fstat(fd).st_mode): os.close(fd)\n"
        "    except OSError: pass\n"
        "time.sleep(300)"
    ),
    "shuts one down": (
        "import os, socket, stat, time\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        if stat.S_ISSOCK(os.fstat(fd).st_mode):\n"
        "            socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_WR); break\n"
        "    except OSError: pass\n"
        "time.sleep(300)"
    ),
    "garbage": (
        "import os, stat, time\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, b'\\xff' * 4096)\n"
        "    except OSError: pass\n"
        "time.sleep(300)"
    ),
    "zeros": (
        "import os, stat, time\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, bytes(64))\n"
        "    except OSError: pass\n"
        "time.sleep(300)"
    ),
}
"""Take their child along, sooner or later in the same second."""

DAMAGING = {
    "closes stdout": "import os\nos.close(1), os.close(2)\nprint('still heard')",
    "replaces stdout": "import os\nos.dup2(os.open('/dev/null', os.O_WRONLY), 1)\nprint('heard')",
    "garbage on stdout": "import os\nos.write(1, os.urandom(5000)), os.write(2, os.urandom(5000))",
    "ignores SIGURG": "import signal\nsignal.signal(signal.SIGURG, signal.SIG_IGN)",
    "breaks sys": "import sys\nsys.stdout = sys.stderr = sys.stdin = None",
    "forks": "import os\nif os.fork() == 0: os._exit(0)",
    "forks on": "import os\nos.fork()\nprint('one or two of us')",
    "await forks on": "import asyncio, os\nawait asyncio.sleep(0)\nos.fork()\nprint('and here')",
    "stack overflow": "def f(): return f()\nf()",
}
"""The session lives on; what it can still do is no better than its user left it."""

FAMILY = {
    "sleeper": "import subprocess\nsubprocess.Popen(['sleep', '300'])",
    "leader": "import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)",
    "daemon": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(300)\n"
        "    os._exit(0)\n"
        "os.wait()"
    ),
    "shell daemon": "import os\nos.system('setsid sh -c \"sleep 300 & sleep 300\" &')",
    "pipe holder": "import subprocess\nsubprocess.Popen(['sh', '-c', 'while :; do echo x; done'])",
    "moving target": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while True:\n"
        "        if os.fork(): os._exit(0)\n"
        "        time.sleep(0.002)"
    ),
    "multiprocessing": (
        "import multiprocessing as m, time\n"
        "m.get_context('fork').Process(target=time.sleep, args=(300,), daemon=True).start()"
    ),
}
"""Leave processes behind that must not outlive the session."""

HARMFUL = frozenset(source for kind in (DEADLY, DAMAGING, FAMILY) for source in kind.values())
"""Effects that may show only after the execution has ended."""
