"""The workloads by name: those with peers, and those whose candidates are ranked."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import workloads_chained as chained
from benchmarks import workloads_linear as linear
from benchmarks import workloads_rows as rows
from benchmarks.workload import (
    DTYPES,
    EPS,
    Computation,
    Outputs,
    Shape,
    TensorSpec,
    Workload,
    shape_label,
)

__all__ = [
    "DTYPES",
    "EPS",
    "MEASURED",
    "RANKED",
    "WORKLOADS",
    "Computation",
    "Outputs",
    "Shape",
    "TensorSpec",
    "Workload",
    "find_workload",
    "shape_label",
]


def _named(*workloads: Workload) -> dict[str, Workload]:
    return {w.name: w for w in workloads}


#: RMSNorm + Linear, which is measured and ranked at the most shapes
WORKLOADS: dict[str, Workload] = _named(linear.norm_linear(False), linear.norm_linear(True))

#: measured against peers, in the order of the table; each has a "matmul" part
MEASURED: dict[str, Workload] = _named(
    WORKLOADS["rmsnorm_linear"],
    linear.norm_linear(False, transposed=True),
    WORKLOADS["rmsnorm_gain_linear"],
    linear.residual_norm_linear(),
    linear.layernorm_linear(),
    linear.linear_bias_relu(),
    linear.gated_mlp(),
    chained.lora(),
    chained.dlrm_mlp(),
)

#: candidates of the search are timed against each other for these; varied ones first, so that a
#: budget that ends early has seen every kind of kernel
RANKED: dict[str, Workload] = _named(
    WORKLOADS["rmsnorm_linear"],
    rows.rmsnorm(),
    rows.softmax(),
    rows.layernorm(),
    MEASURED["gated_mlp"],
    MEASURED["residual_rmsnorm_linear"],
    MEASURED["linear_bias_relu"],
    WORKLOADS["rmsnorm_gain_linear"],
)


def find_workload(name: str, known: Mapping[str, Workload] = MEASURED) -> Workload:
    """The registered workload of that name.

    Raises:
        ValueError: unknown; the message lists the known ones.
    """
    if name not in known:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(sorted(known))}")
    return known[name]
