"""Watch executions from a producer: events, commands, results."""
