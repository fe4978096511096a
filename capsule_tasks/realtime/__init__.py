"""Realtime sessions: agents that talk over one connection to a model."""
