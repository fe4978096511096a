"""Groups of executions: watch, count and cancel them."""
