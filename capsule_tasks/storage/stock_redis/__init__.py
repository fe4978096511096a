"""Keys that belong to kombu's own Redis transport."""
