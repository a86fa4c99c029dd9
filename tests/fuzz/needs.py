"""A look at what compiling and launching need, before anything is run."""

from __future__ import annotations

import shutil

import torch

from cutesuper.errors import CutesuperError
from cutesuper.pipeline import current_target
from cutesuper.runtime.toolchain import dsl_versions

#: the exit status of a run that could not do, or did not do, what was asked
NOTHING = 2
NOTHING_LAUNCHED = "NOTHING WAS LAUNCHED: this run says nothing about kernels"


def missing(gpu: bool, ptx: bool, compiling: bool = False) -> str:
    """What is asked for and cannot be had here; nothing if all can.

    Args:
        gpu: kernels are launched on a GPU.
        ptx: on the machine of `tests.ptx`.
        compiling: they are compiled.
    """
    if not (gpu or ptx or compiling):
        return ""
    try:
        dsl_versions()
        if gpu:
            current_target()
    except CutesuperError as error:
        return f"nothing was run: {error}"
    if gpu and not torch.cuda.is_available():
        return "nothing was run: --gpu needs a GPU, and PyTorch finds none; use --ptx"
    if ptx and shutil.which("gcc") is None:
        return "nothing was run: --ptx needs gcc, which compiles its machine"
    return ""
