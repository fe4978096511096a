"""What the Redis transport of kombu needs: renewals, batched acknowledgements, stored revokes."""
