"""Named sessions in Redis: their call logs, their owners, and the lists of them."""
