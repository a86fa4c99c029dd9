"""Common parts of the examples: options, ways of computing the same, their comparison, times,
plots."""
