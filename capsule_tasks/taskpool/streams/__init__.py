"""The streams of a worker's executions: what they say goes to Redis, what they are told comes back.

All of it is on the runtime's loop. Redis is authoritative: for which attempt of an execution may
still write, and for whether it is over. What is here may be stale, and is refused there.

- `worker`: all of it together, as the pool starts, feeds and stops it.
- `tenure`: the one lease of the worker, and what is noted as held under it.
- `admission`: on its way to the crew, a job begins at once, or when its attempt is claimed.
- `publication`: one job, from there to its end. It has a `backlog` of what waits to be sent, an
  `attempt` that makes the calls, a `line` that they go on, and `orders` that it hears.
- `room`: the bytes that all publications share.
- `discarded`: tasks that never come to the crew, and end all the same.
- `notes`: the indexes that follow; `reaper`: the ends of what another worker held, which is gone.
"""
