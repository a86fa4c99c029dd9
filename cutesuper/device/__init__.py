"""Hand-written building blocks for CuTe DSL kernels, independent of graphs and plans."""
