"""What the operating system offers beyond the standard library: prctl, process families."""
