"""Support for the Redis transport of kombu: renewals, batched acknowledgements, stored revokes."""
