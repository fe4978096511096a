"""The live named sessions of a worker: taking them, running their calls in order, leaving them."""
