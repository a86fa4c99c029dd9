"""Modules of ``torch.nn`` that run the operators of `cutesuper.ops`.

They are subclasses: constructor arguments, parameters, ``state_dict`` and ``isinstance`` are those
of PyTorch. Cases that the operators do not support are refused when a module is made, or called.
"""

from __future__ import annotations

from cutesuper.torch.nn import *  # noqa: F403
from cutesuper.torch.nn import __all__ as __all__
