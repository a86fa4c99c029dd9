"""Frontend for PyTorch: functions and modules are traced, cut into regions, made kernel graphs.

This package stands on top of everything else, like `cutesuper.ops`; it imports torch.
"""
