"""cutesuper: a superoptimizer that writes GPU kernels in CuTe DSL."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cutesuper import errors, interrupted, source_tree  # noqa: F401  # pyright: ignore
from cutesuper.api import superoptimize
from cutesuper.autodiff.gradient import Split, grad, split
from cutesuper.contrib.mirage.load import load_mirage
from cutesuper.given import compile_mugraph
from cutesuper.ir.block import MuGraph
from cutesuper.ir.dtypes import DType, bfloat16, float16, float32, int32, int64
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph, symbol
from cutesuper.ir.serial import dumps, loads
from cutesuper.pipeline import mugraphs
from cutesuper.runtime.kernel import Kernel
from cutesuper.runtime.program import load
from cutesuper.targets import B200, B300, H100, H200, Target
from cutesuper.tune.tuner import tune
from cutesuper.verify.equivalence import Verification, verify
from cutesuper.version import __version__ as __version__

if TYPE_CHECKING:
    from cutesuper import nn, ops, optim
    from cutesuper.torch.compile.explain import explain
    from cutesuper.torch.compile.traced_program import TracedProgram
    from cutesuper.torch.generate import Decoder, generate
    from cutesuper.torch.patch import Patch, patch, register_attention

__all__ = [
    "B200",
    "B300",
    "H100",
    "H200",
    "DType",
    "Decoder",
    "Kernel",
    "KernelGraph",
    "MuGraph",
    "Patch",
    "Split",
    "Target",
    "Tensor",
    "TracedProgram",
    "Verification",
    "bfloat16",
    "compile_mugraph",
    "dumps",
    "errors",
    "explain",
    "float16",
    "float32",
    "generate",
    "grad",
    "int32",
    "int64",
    "load",
    "load_mirage",
    "loads",
    "mugraphs",
    "new_kernel_graph",
    "nn",
    "ops",
    "optim",
    "patch",
    "register_attention",
    "split",
    "superoptimize",
    "symbol",
    "tune",
    "verify",
]

source_tree.announce()

#: public names of modules that import torch
_LATE = {
    "Decoder": "cutesuper.torch.generate",
    "Patch": "cutesuper.torch.patch",
    "TracedProgram": "cutesuper.torch.compile.traced_program",
    "explain": "cutesuper.torch.compile.explain",
    "generate": "cutesuper.torch.generate",
    "patch": "cutesuper.torch.patch",
    "register_attention": "cutesuper.torch.patch",
}


def __getattr__(name: str) -> Any:
    """Import the modules that need torch at the first use of their names.
    Nothing else here needs it."""
    if name in ("nn", "ops", "optim"):
        return importlib.import_module(f"cutesuper.{name}")
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'cutesuper' has no attribute {name!r}")
