"""Stop user code in the main thread of a child, without breaking this package's own code."""
