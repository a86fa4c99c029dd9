"""Measurements of the search: programs, their muGraphs, time and memory, and ablations."""
