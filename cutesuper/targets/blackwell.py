"""Blackwell (sm_100a): datasheet figures; none of them has been measured yet.

Kernels without matrix products compile for it.
"""

from __future__ import annotations

from dataclasses import replace

from cutesuper.targets.hopper import H200

#: B200: datasheet figures; what they leave open is Hopper's, until it is measured.
B200 = replace(
    H200,
    name="b200",
    arch="sm_100a",
    sms=148,
    clusters={1: 148, 2: 74, 4: 32, 8: 16, 16: 8},
    bandwidth=7.0e12,
    l2_bandwidth=1.25e13,
    tensor_flops=1.8e15,
)
