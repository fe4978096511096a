"""One child process: how it is spawned, its channels, its confinement, its exit."""
