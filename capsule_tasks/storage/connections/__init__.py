"""The way to Redis: from a URL to connections, and from what redis-py raises to our own errors.

`targets` reads a URL. `endpoints` is the one place that makes connections of a target: to a single
server, the primary that Sentinels know, or a cluster; with or without TLS; awaited or blocking.
`asynchronous` and `blocking` keep connections for `callers`, which make calls, one at a time on
each; `pipelined` has many calls on one connection at once. `listeners` hear one channel, and
`doorbells` many.
"""
