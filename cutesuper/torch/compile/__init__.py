"""The front end: functions and modules of PyTorch are traced, cut into regions, made kernel graphs.

It stands above `cutesuper.torch.aten`, the table of operators, and `cutesuper.torch.ops`.
"""
