"""From a plan to a traced CuTe DSL kernel: Python that runs while the DSL traces."""
