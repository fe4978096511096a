"""Event streams of executions, their indexes, steps and holds."""
