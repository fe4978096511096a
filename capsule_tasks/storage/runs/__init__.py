"""Stored runs, their approvals, and the index of calls that wait for a decision."""
