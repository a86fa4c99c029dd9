"""Blackwell (sm_100a): datasheet figures; none of them has been measured yet.

Kernels without matrix products compile for it.
"""

from __future__ import annotations

from cutesuper.targets import hopper
from cutesuper.targets.base import Target

#: Hopper's, until they are measured
RATES, ATTENTION, ROWS = hopper.RATES, hopper.ATTENTION, hopper.ROWS
SETTINGS = hopper.SETTINGS

#: B200: datasheet figures.
B200 = Target(
    name="b200",
    arch="sm_100a",
    sms=148,
    shared_bytes=232448,
    reserved_bytes=1024,
    sm_threads=2048,
    sm_blocks=32,
    registers=65536,
    clusters={1: 148, 2: 74, 4: 32, 8: 16, 16: 8},
    bandwidth=7.0e12,
    l2_bandwidth=1.25e13,
    tensor_flops=1.8e15,
    launch_us=1.5,
    rates=RATES,
    attention=ATTENTION,
    rows=ROWS,
    settings=SETTINGS,
)
