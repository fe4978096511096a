"""Code that producers send: its lanes of fresh sessions, and the tracer that ends it."""
