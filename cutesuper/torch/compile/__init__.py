"""The front end: functions and modules of PyTorch are traced, cut into regions, made kernel graphs.

This package stands on top of everything else, like `cutesuper.ops`; it imports torch.
"""
