"""Frontend for PyTorch: traces functions and modules, cuts them into regions and makes kernel
graphs.

This package stands on top of everything else, like `cutesuper.ops`; it imports torch.
"""
