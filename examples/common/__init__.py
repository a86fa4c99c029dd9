"""Common parts of the examples: options, comparison of ways, times, plots."""
