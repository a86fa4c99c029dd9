"""What examples share: options, ways of computing the same, their comparison, times, plots."""
