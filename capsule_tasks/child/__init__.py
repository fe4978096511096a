"""The subprocess side of a session.

Three threads, each with one job:

- the **control thread** reads every frame, and answers requests that need no user code;
- the **main thread** runs user code: one blocking execution at a time, or many coroutines;
- the **pump** sends output that its writer has not sent in time.

User code never runs on the control thread, and only the control thread reads from the parent. So a
cancel is received whatever the code does, as long as the code releases the GIL now and then.
"""
