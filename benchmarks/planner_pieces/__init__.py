"""Pieces of the planner benchmark; run them with `python benchmarks/planner.py`."""
