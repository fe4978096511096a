"""The engine of runs: one turn after the other, in process or durably."""
