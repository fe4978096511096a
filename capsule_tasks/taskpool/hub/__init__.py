"""The event loop that the hub thread and the runtime thread share, and the calls between them."""
