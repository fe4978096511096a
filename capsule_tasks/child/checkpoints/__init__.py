"""A namespace as bytes, and bytes as a namespace. Both run code of the user."""
