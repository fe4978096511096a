"""Pools of warm sessions: the plan decides, the pool of each profile carries it out."""
