"""Building blocks for CuTe DSL kernels, written by hand. They know nothing of graphs or plans."""
