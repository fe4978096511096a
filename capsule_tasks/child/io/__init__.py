"""Standard input and output of user code in a child."""
