"""One session: its phases, its agent, its events, and how everything of it is released."""
