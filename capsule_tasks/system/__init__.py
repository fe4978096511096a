"""System calls that the standard library does not offer: prctl, Landlock, process families."""
