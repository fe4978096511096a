"""The subprocess side of a session.

Three kinds of threads live here, and each has one job:

- the **control thread** reads every frame and answers what can be answered without user code;
- the **main thread** runs user code: one blocking execution at a time, or many coroutines;
- the **pump** sends output that nobody flushed in time.

User code never runs on the control thread, and only the control thread reads the parent, so a
cancel is heard whatever the code does, as long as the interpreter gives up the GIL now and then.
"""
