"""Hopper (sm_90a). Times in the comments were measured on one H200.

A rate without a measurement in its comment was chosen with the others so that the predictions of
matmul kernels come out right (within some 10%); no single measurement shows it.
"""

from __future__ import annotations

from cutesuper.graph.targets.base import Rates, Target

RATES = Rates(
    # 96 blocks still stream 50 MB at full speed (14.2 us), 64 blocks do not; a block that takes
    # whole rows of X besides 512 KB is slower
    sm_bytes_per_us=48e3,
    # a request returns in half the time
    sm_bytes_per_us_idle=100e3,
    # K tile 64 -> 128 gained 0.45 us over 16 iterations fewer
    iteration_us=0.025,
    # 620 of 16000 cycles for a pair
    exchange_us=0.3,
    # 16-byte pieces: 300x1024x1000 with 64x128 tiles takes 7.9 us alone and 9.1 us in pairs, which
    # send 16 KB
    exchange_us_per_kb=0.08,
    wave_us=1.0,
    block_us=0.5,
    # 788 TFLOP/s peak, 755 measured at 256 x 128
    tensor_efficiency=0.97,
    half_area=1024,
    # 128 lanes at 1.75 GHz, half of them reached
    lanes_per_us=128 * 1750 / 2,
    instructions={
        "exp": 8, "sqrt": 8, "rsqrt": 8, "div": 8, "silu": 16, "gelu": 24, "sigmoid": 16,
        "tanh": 16,
    },
    # estimated, not measured
    prologue_us=0.02,
    # K tiles of 128 and 256 ran 10.25 and 10.3 us
    first_stage=0.75,
    exposed=0.3,
    # 4096^3 takes 267 us with 256x128 tiles, which read the rows for their statistics twice as
    # often as 128x256 tiles do (233 us)
    contention=0.05,
)  # fmt: skip

#: H200: copy 4.23 TB/s, streaming floor 9.6 us for 33.7 MB plain, 8.2 with dependent launch;
#: 66 / 30 / 15 clusters of 2 / 4 / 8 fit at one block per SM (occupancy query); 788 TFLOP/s bf16.
H200 = Target(
    name="h200",
    arch="sm_90a",
    sms=132,
    shared_bytes=232448,
    registers=65536,
    clusters={1: 132, 2: 66, 4: 30, 8: 15},
    bandwidth=4.23e12,
    l2_bandwidth=7.0e12,
    tensor_flops=7.5e14,
    launch_us=1.8,
    rates=RATES,
)

#: H100 SXM: the same chip with 3.35 TB/s of memory (datasheet; about 90% of it is reachable).
H100 = Target(
    name="h100",
    arch="sm_90a",
    sms=132,
    shared_bytes=232448,
    registers=65536,
    clusters={1: 132, 2: 66, 4: 30, 8: 15},
    bandwidth=3.0e12,
    l2_bandwidth=7.0e12,
    tensor_flops=7.5e14,
    launch_us=1.8,
    rates=RATES,
)
