"""The operators of PyTorch in kernel graphs: a table with one entry for each.

Traced functions and graphs of ``torch.compile`` become kernel graphs by it, in
`cutesuper.torch.compile`, and functions of scores, in `cutesuper.torch.ops`.
"""
