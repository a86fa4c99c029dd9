"""Quack and Liger as implementations of training operators: the functions that launch kernels.

Both have functions below their autograd classes, which return the values saved for the backward
pass; these are called here. A pass without a kernel in a library, or with none that can be
repeated, raises a ValueError, and is listed among the failures of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from benchmarks.peers import Implementation, Launcher
from benchmarks.problem import Problem
from benchmarks.training_operators import EPS
from benchmarks.training_torch import autograd_launcher, training_of
from benchmarks.workload import Outputs
from benchmarks.workloads_training import Step

Sets = Sequence[Outputs]
#: takes the inputs of all sets, prepares, and returns a function that launches one
Pass = Callable[[Sets], Callable[[int], Outputs]]
Passes = tuple[Pass, Pass]


def _float32(sets: Sets, *places: int) -> list[Outputs]:
    """The sets, with copies of some tensors."""
    return [tuple(t.float() if n in places else t for n, t in enumerate(s)) for s in sets]


# ------------------------------------------------------------------------------------------- quack


def _quack(name: str) -> ModuleType:
    # the package has functions of the same names
    return import_module(f"quack.{name}")


def quack_rms_forward(sets: Sets) -> Callable[[int], Outputs]:
    """RMSNorm that saves the reciprocal root."""
    call = _quack("rmsnorm").rmsnorm_fwd
    return lambda i: call(*sets[i], eps=EPS, store_rstd=True)[:1]


def quack_rms_backward(sets: Sets) -> Callable[[int], Outputs]:
    """dx and dw."""
    library = _quack("rmsnorm")
    kept = [library.rmsnorm_fwd(x, w, eps=EPS, store_rstd=True)[2] for x, w, _ in sets]

    def run(i: int) -> Outputs:
        x, w, dy = sets[i]
        return library.rmsnorm_bwd(x, w, dy, kept[i])[:2]

    return run


def quack_layer_forward(sets: Sets) -> Callable[[int], Outputs]:
    """LayerNorm; weight and bias must be float32, and are converted before the clock runs."""
    call, wide = _quack("rmsnorm").layernorm_fwd, _float32(sets, 1, 2)
    return lambda i: call(*wide[i], eps=EPS, return_rstd=True, return_mean=True)[:1]


def quack_layer_backward(sets: Sets) -> Callable[[int], Outputs]:
    """dx, dw and db, the last two in float32 like the weight."""
    library, wide = _quack("rmsnorm"), _float32(sets, 1, 2)
    kept = [
        library.layernorm_fwd(x, w, b, eps=EPS, return_rstd=True, return_mean=True)[1:]
        for x, w, b, _ in wide
    ]

    def run(i: int) -> Outputs:
        x, w, _, dy = wide[i]
        return library.layernorm_bwd(x, w, dy, *kept[i])

    return run


def quack_softmax_forward(sets: Sets) -> Callable[[int], Outputs]:
    """Softmax."""
    call = _quack("softmax").softmax_fwd
    return lambda i: (call(*sets[i]),)


def quack_softmax_backward(sets: Sets) -> Callable[[int], Outputs]:
    """dx from the saved result."""
    library = _quack("softmax")
    kept = [library.softmax_fwd(x) for x, _ in sets]
    return lambda i: (library.softmax_bwd(sets[i][1], kept[i]),)


def quack_loss_forward(sets: Sets) -> Callable[[int], Outputs]:
    """Losses in float32; saves log-sum-exp."""
    call = _quack("cross_entropy").cross_entropy_fwd
    return lambda i: call(*sets[i], return_lse=True)[:1]


def quack_loss_backward(sets: Sets) -> Callable[[int], Outputs]:
    """dx from logits and log-sum-exp."""
    library = _quack("cross_entropy")
    kept = [library.cross_entropy_fwd(x, t, return_lse=True)[1] for x, t, _ in sets]

    def run(i: int) -> Outputs:
        x, target, dloss = sets[i]
        return (library.cross_entropy_bwd(x, target, dloss, kept[i]),)

    return run


QUACK: dict[str, Passes] = {
    "rms_norm": (quack_rms_forward, quack_rms_backward),
    "layer_norm": (quack_layer_forward, quack_layer_backward),
    "softmax": (quack_softmax_forward, quack_softmax_backward),
    "cross_entropy": (quack_loss_forward, quack_loss_backward),
}


# ------------------------------------------------------------------------------------------- liger


def _liger(name: str) -> ModuleType:
    return import_module(f"liger_kernel.ops.{name}")


#: arguments of `LigerRMSNorm`: offset of the weight, casts, choice of the kernel
LIGER_RMS = (0.0, "llama", None)


def liger_rms_forward(sets: Sets) -> Callable[[int], Outputs]:
    """RMSNorm that saves the reciprocal root."""
    call = _liger("rms_norm").rms_norm_forward
    return lambda i: call(*sets[i], EPS, *LIGER_RMS)[:1]


def liger_rms_backward(sets: Sets) -> Callable[[int], Outputs]:
    """dx and dw; not in place, which is its default: the next call would see another dy."""
    library = _liger("rms_norm")
    offset, _, rows = LIGER_RMS
    kept = [library.rms_norm_forward(x, w, EPS, *LIGER_RMS)[2:] for x, w, _ in sets]

    def run(i: int) -> Outputs:
        x, w, dy = sets[i]
        rstd, block, warps, casting = kept[i]
        return library.rms_norm_backward(dy, x, w, rstd, offset, casting, block, warps, False, rows)

    return run


def liger_layer_forward(sets: Sets) -> Callable[[int], Outputs]:
    """LayerNorm that saves mean and reciprocal root."""
    call = _liger("layer_norm").layer_norm_forward
    return lambda i: call(*sets[i], EPS)[:1]


def liger_layer_backward(sets: Sets) -> Callable[[int], Outputs]:
    """dx, dw and db."""
    library = _liger("layer_norm")
    kept = [library.layer_norm_forward(x, w, b, EPS)[2:4] for x, w, b, _ in sets]

    def run(i: int) -> Outputs:
        x, w, b, dy = sets[i]
        return library.layer_norm_backward(dy, x, w, b, *kept[i])

    return run


def liger_softmax_forward(sets: Sets) -> Callable[[int], Outputs]:
    """Softmax."""
    call = _liger("softmax")._softmax_forward
    return lambda i: call(*sets[i])[:1]


def liger_softmax_backward(sets: Sets) -> Callable[[int], Outputs]:
    """dx from the saved result."""
    library = _liger("softmax")
    kept = [library._softmax_forward(x) for x, _ in sets]
    return lambda i: (library._softmax_backward(sets[i][1], *kept[i]),)


def liger_loss_forward(sets: Sets) -> Callable[[int], Outputs]:
    """The kernel of the loss without its gradient.
    It is launched directly, since the library's function asks the device for the number of labels,
    which no CUDA graph can contain."""
    library = _liger("cross_entropy")
    rows, columns = sets[0][0].shape
    options = {
        "weight_ptr": None, "z_loss_ptr": None, "token_accuracy_ptr": None,
        "token_accuracy_stride": 0, "predicted_tokens_ptr": None, "predicted_tokens_stride": 0,
        "n_cols": columns, "n_non_ignore": rows, "sum_non_ignore_weight": rows,
        "ignore_index": -100, "weight_sum": 0.0, "lse_square_scale": 0.0, "label_smoothing": 0.0,
        "reduction": "none", "softcap": None, "RETURN_Z_LOSS": False,
        "RETURN_TOKEN_ACCURACY": False, "RETURN_PREDICTED_TOKENS": False, "HAS_WEIGHT": False,
        "HAS_SOFTCAPPING": False, "HAS_GRADIENTS": False, "num_warps": 32,
        "BLOCK_SIZE": min(library.MAX_FUSED_SIZE, 1 << (columns - 1).bit_length()),
    }  # fmt: skip

    def run(i: int) -> Outputs:
        x, target = sets[i]
        loss = torch.zeros(rows, dtype=x.dtype, device=x.device)
        library.liger_cross_entropy_kernel[(rows,)](
            X_ptr=x, X_stride=x.stride(0), Y_ptr=target, Y_stride=1,
            loss_ptr=loss, loss_stride=1, **options,
        )  # fmt: skip
        return (loss,)

    return run


def liger_loss_backward(sets: Sets) -> Callable[[int], Outputs]:
    """Raise ValueError, as the pass has no kernel of its own."""
    del sets
    raise ValueError("Liger writes gradients over the logits in the forward pass; it has no other")


def liger_swiglu_forward(sets: Sets) -> Callable[[int], Outputs]:
    """SwiGLU."""
    call = _liger("swiglu").swiglu_forward
    return lambda i: call(*sets[i])[2:]


def liger_swiglu_backward(sets: Sets) -> Callable[[int], Outputs]:
    """Raise ValueError, as the pass cannot be repeated."""
    del sets
    raise ValueError("Liger writes gradients over gate and up: it would run once on each")


LIGER: dict[str, Passes] = {
    "rms_norm": (liger_rms_forward, liger_rms_backward),
    "layer_norm": (liger_layer_forward, liger_layer_backward),
    "softmax": (liger_softmax_forward, liger_softmax_backward),
    "cross_entropy": (liger_loss_forward, liger_loss_backward),
    "swiglu": (liger_swiglu_forward, liger_swiglu_backward),
}


# ------------------------------------------------------------------------------------- taking part


def _quack_call(name: str) -> Callable[..., Any]:
    """The call with autograd."""
    if name == "rms_norm":
        return partial(_quack("rmsnorm").rmsnorm, eps=EPS)
    if name == "cross_entropy":
        return partial(_quack("cross_entropy").cross_entropy, reduction="none")
    if name == "softmax":
        return _quack("softmax").softmax
    raise ValueError(f"quack has no call of {name} with autograd")


def _liger_call(name: str) -> Callable[..., Any]:
    """The call with autograd."""
    if name == "rms_norm":
        call = _liger("rms_norm").LigerRMSNormFunction.apply
        # not in place: a second call would see another cotangent
        return lambda x, w: call(x, w, EPS, *LIGER_RMS[:2], False, LIGER_RMS[2])
    if name == "layer_norm":
        call = _liger("layer_norm").LigerLayerNormFunction.apply
        return lambda x, w, b: call(x, w, b, EPS)
    if name == "softmax":
        return _liger("softmax").LigerSoftmaxFunction.apply
    raise ValueError(
        f"Liger's {name} writes gradients over its operands: a call cannot be repeated"
    )


def _library(
    passes: dict[str, Passes], call_of: Callable[[str], Callable[..., Any]], problem: Problem
) -> Launcher:
    workload = training_of(problem)
    name = workload.operator.call
    if workload.host:
        return autograd_launcher(problem, call_of(name))
    forward, backward = passes[name]
    prepare = forward if workload.step is Step.FORWARD else backward
    asked = [spec.dims for spec in workload.outputs(problem.shape)]
    launch = prepare(problem.inputs)

    def run(i: int) -> Outputs:
        return tuple(t.view(dims) for t, dims in zip(launch(i), asked, strict=True))

    return Launcher(run)


LIBRARIES: tuple[Implementation, ...] = (
    Implementation("liger", "peer", partial(_library, LIGER, _liger_call)),
    Implementation("quack", "peer", partial(_library, QUACK, _quack_call)),
)


def absent_from(operator: str) -> frozenset[str]:
    """Names of the libraries without this operator."""
    known = {"liger": LIGER, "quack": QUACK}
    return frozenset(name for name, passes in known.items() if operator not in passes)
