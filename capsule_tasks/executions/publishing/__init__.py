"""Everything that executions ask of Redis: events, claims, leases, commands, indexes."""
