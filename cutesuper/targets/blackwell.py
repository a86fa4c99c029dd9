"""Blackwell (sm_100a, sm_103a): public figures; none of them has been measured here.

What they leave open is Hopper's, until it is measured.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from cutesuper.targets.hopper import H200, WIDE

#: half of the 2.25e15 of the datasheet: instructions of 64 rows keep half of the tensor cores busy
TENSOR_FLOPS = 1.1e15
L2_BANDWIDTH = 1.25e13

#: the constants of Hopper's products of many rows that had no word on shared memory, which tcgen05
#: reads otherwise than WGMMA does
FORMER = replace(
    WIDE,
    l2_bandwidth=21e12,
    tensor_flops=TENSOR_FLOPS,
    overlap=5.05,
    latency_us=0.873,
    reread=0.992,
    half_area=187,
    cluster_store_us=0.127,
    exchange_us_per_kb=0.0762,
    shared_bytes_per_us=inf,
)

#: B200: 7680 bits at 3996 MHz are 7.67 TB/s, of which about 90% is reachable; 64 bytes a cycle and
#: multiprocessor from L2 would be 17.5 TB/s
B200 = replace(
    H200,
    name="b200",
    arch="sm_100a",
    sms=148,
    clusters={1: 148, 2: 74, 4: 32, 8: 16, 16: 8},
    bandwidth=7.0e12,
    l2_bandwidth=L2_BANDWIDTH,
    tensor_flops=TENSOR_FLOPS,
    rates=replace(H200.rates, kept_bytes=inf),
    wide=FORMER,
    # 512 columns of tensor memory for instructions of 64 rows
    accumulators=512 * 64,
    doubled=2.0,
    hands_out=True,
    joint=True,
)

#: B300: the same in dense 16-bit products and in bandwidth, with more memory
B300 = replace(B200, name="b300", arch="sm_103a")
