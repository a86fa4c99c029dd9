"""Hopper (sm_90a). Times in the comments are microseconds, measured on one H200.

The constants that `benchmarks calibrate` fits were fitted to 864 candidates of 24 cases, measured
by `benchmarks rank`; the comments name the cases that determine a constant. Fitted to every second
case only, the model orders the other 12 nearly as well: the best is among its first five in all.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from cutesuper.targets.base import (
    AttentionRates,
    LibraryRates,
    Rates,
    RowRates,
    Target,
    WideRates,
)

#: softmax(Q K) V as it is lowered, cold L2, fitted together; each comment names the measurements
#: behind a constant. Decoding: sequences x keys, 8 heads of K and V with 4 rows each and 128
#: columns; "256 rows" are those of a head, with 4096 keys and 64 columns. C8 G2 is a cluster of 8
#: and 2 parts of the grid.
ATTENTION = AttentionRates(
    # decoding 64 x 4096 takes 239.5, 1 x 131072 takes 123.3 in C8: 4.5 TB/s, read without staying
    # in L2
    streamed=1.045,
    # 256 rows of 16 heads in C2 take 13.9, where 64 MB come from L2 (7.3 at its full rate) and
    # neither chain nor tensor cores take longer; 2048 causal positions in tiles of 64 rows 93
    from_l2=0.78,
    # decoding 1 x 65536 takes 62.9 in C8, 59 of them for memory, although an SM needs 49 to take in
    # its part and the tensor cores need as long; 64.8 with twice as many SMs in C2 G8
    overlap=15,
    # time of 1 x 4096 to 1 x 131072 beside memory and launch: 2 in C8, 1 to 2 undivided
    ramp_us=1.8,
    # 256 rows of 2 heads in C8: 6.4 with tiles of 128 keys, 7.06 with 64
    step_us=0.265,
    # causal positions, 32 heads on 8, 128 columns: 2048 take 63.0, 4096 221, 8192 853, 16384 3381;
    # 8192 and 64 columns 571 to 659; all of 4096 positions 447 and 322
    apart_us=0.12,
    # 16 per cycle at 1.75 GHz
    exps_per_us=16 * 1750,
    # estimate: norms of Q and V of 256 rows take 7.7 (2 heads) and 18.2 (16 heads) where the same
    # warps multiply, and 1 to 2 less where others compute them
    value_reads_per_us=23e3,
    # 256 rows of 2 heads (4096 results in a block): 6.4 in C8; all else explains 5.4
    meet_us=0.2,
    # decoding: 1 x 4096 takes 7.31 in C8, 9.67 in C4; 16 x 4096 takes 60.9 undivided, 63.9 in C2
    cluster_us=0.05,
    # a prototype: 256 rows of 16 heads in C2 take 14.0 in tiles of 64 rows, 16.9 in C2 G2 and tiles
    # of 128 rows: 14.9 without the grid, 14.0 without joining
    cluster_sent_us=0.08,
    # decoding 1 x 4096: 7.31 in C8, 8.55 in C4 G2, 8.53 in C2 G8
    grid_us=1.25,
    # the same in G16, of which the last one reads 16 x 512 results: 9.85; and the prototype above
    grid_moved_us=0.1,
    # dependent launches of 1x16384 keys in 8 clusters of 8, of which 15 fit, take 25.1, plain ones
    # 18.8; of 2x4096 in 16 of 4 13.4 and 11.3
    late=1.5,
    # 1x16384 keys take 19.5 in 64 pairs of 66, 25.4 in 40
    crowd=10,
)

#: The backward pass of RMSNorm as a prototype of one launch, rows x elements in bf16, cold L2,
#: plain launches.
ROWS = RowRates(
    # 1024 x 4096: 9.65 without the sum over the rows, 5.8 of them for memory and 1.5 for the
    # launch; 4096 x 1024: 8.72
    start_us=1.3,
    # a block of 4096 x 8192 visits 32 rows and takes 53.7, 46.3 of them for memory; 32768 x 4096
    # visits 125 times: 192.5, 185 of them for memory
    visit_us=0.03,
    # 4096 x 4096: 28.6 with two stages of 32 KB, 31.1 with four; 4096 x 16384 with 128 KB in flight
    # and no cluster: 108 to 121, in a cluster of 2 101.6
    deep=1.08,
    # 4096 x 4096: 31.2 with the sum over the rows, 29.6 without; 4096 x 1024: 12.4 and 10.1, where
    # there is a quarter of the partial results; 0.4 less if they leave before the last rows do
    finish_us=1.5,
    # LayerNorm 32768 x 16384 in clusters of 2, 497 visits: 764, no more than the memory takes, as
    # for RMSNorm; 16384 x 65536 in clusters of 8, 1093 visits: 2748, an estimated third of it for
    # adding up 128 values in each reduction (now 8)
    cluster_us=0.1,
    # estimate: the first loads and the last stores, one after the other
    block_us=2.0,
)

RATES = Rates(
    # too few blocks to saturate the memory: 5 of 64x256 and 128 iterations of 40 KB take 56, 20 of
    # 64x64 and 128 iterations of 16 KB 27.4, 24 of 8x256 and 64 of 33 KB 27.9
    sm_bytes_per_us=86e3,
    # 8 rows, weights (N, K), K tiles of 64 and 128: 240.0 and 234.3 at 8x4096x128256, 56.3 and 55.5
    # for two weights of 8x4096x14336, 29.1 and 28.5 at 8x14336x4096
    piece_bytes=2.6,
    # 64x8192x1280: 20 blocks with 128 iterations each, 27.4; hidden where the memory is slower:
    # K tiles of 64 and 128 take 10.65 and 10.1 at 16x4096x4096, 56.8 and 57.6 at 16x4096x28672
    iteration_us=0.11,
    # X * gain rewritten: 11.0 -> 16.4 at 64x8192x1280 and 6.0 -> 8.9 at 300x1024x1000 with 64 rows,
    # 207 -> 265 at 4096^3 with 128 rows and 241 -> 398 with 256, but 10.1 -> 10.2 with 16 rows
    prologue_per_us=14e3,
    # 4096^3: 241 with 256x128 tiles, which read the rows twice as often as 128x256 tiles do (207);
    # without statistics both take about 205
    statistic_per_us=120e3,
    # 48 blocks at 2x4096x6144 take 17 beside the fixed cost, where the memory alone takes 11.6 and
    # the SMs alone 13; 96 blocks take 11.7
    overlap=4,
    # the next four were fitted with `WIDE`; products of up to 64 rows have one row tile
    kept_bytes=20e6,
    shared_bytes_per_us=inf,
    # 512x14336x4096: 106.5 with a gain, 90.8 without, both in 128x128 tiles
    scaled_reads=1.83,
    # 8192x14336x4096: 1476 with a norm, 1352 without
    helper_bytes_per_us=6.0e3,
    # 4095^3 takes 1170 in tiles of 176x128 that copy both operands, 16x4097x4095 26.7
    copied_bytes_per_us=12.5e3,
    # estimate: products of up to 64 rows wait for memory
    tensor_overlap=inf,
    # few rows: one row tile, and rings that hold what the memory has on its way
    latency_us=0.0,
    reread=0.0,
    # K tiles of 128 and 256 take 10.1 and 10.2 at 16x4096x4096, 4.1 and 4.3 at 2048x512x256
    first_stage=0.5,
    # 28.6 with 112 blocks of 8x128, 29.7 with 224 of 8x64 (1x4096x14336)
    block_us=0.25,
    # 2048x512x256: 4.1, 4.9, 6.2 and 9.4 with 64x64, 64x128, 128x128 and 128x256 accumulators,
    # the longer loads of the larger tiles included
    store_us=0.08,
    # 300x1024x1000 with 64x128 tiles: 7.7 alone, 9.1 in pairs that finish 4096 accumulators each
    # and send 16 KB
    cluster_store_us=0.4,
    # 2048x512x256 in clusters of 8, one iteration: 1024 blocks that send 14 KB 21.4, 512 blocks
    # that send 28 KB 23.7
    exchange_us_per_kb=0.145,
    # 300x1024x1000 with 64x64 tiles: 7.4 as X / rms, then a product; 12.1 as the statistics, then a
    # product that divides by them in its epilogue
    row_load_us=0.072,
    # rows of 4096: 2.64 for the norm of 128 rows, in one kernel
    reduction_us=0.44,
    # estimates: LoRA 16x4096x4096, weights (N, K), takes 10.5 where RMSNorm + Linear takes 10.3;
    # 2048x512x256 takes 4.2 with relu and 4.6 with a last layer of one output in a cluster
    after_product_us=0.4,
    column_reduction_us=0.3,
    cluster_reduction_us=0.6,
    # 788 TFLOP/s peak, 755 measured at 256 x 128
    tensor_efficiency=0.97,
    half_area=1024,
    # it has 8, but reads the column operand (2 KB at 128 bytes per cycle) as long as an instruction
    # of 32 rows computes
    vector_rows=32,
    # 4096^3 with statistics from another kernel pays 5.6 for each wave of 128 rows, 300x1024x1000
    # 4.7 for 64
    row_loads=64,
    # 128 lanes at 1.75 GHz, half of them reached
    lanes_per_us=128 * 1750 / 2,
    # 16 exponentials a clock
    instructions={
        "exp": 4, "sqrt": 8, "rsqrt": 8, "div": 8, "silu": 16, "gelu": 24, "sigmoid": 16,
        "tanh": 16, "erf": 16, "log1p": 16, "expm1": 16, "sin": 24, "cos": 24,
        "asin": 16, "acos": 16, "atan": 16, "sinh": 16, "cosh": 16, "asinh": 24, "acosh": 24,
        "atanh": 24, "erfc": 24, "pow": 40,
        "fmod": 32, "remainder": 40, "floor_divide": 48, "atan2": 40, "argmax": 4, "cumsum": 4,
    },
)  # fmt: skip

#: Products in bf16, alone, with norms, gains, residuals and gates, cold L2, plain launches: 1320
#: schedules of 45 shapes, 72 to 8192 rows by 4096x4096, 4096x14336 and 14336x4096, in four runs on
#: an H200 (docs/notebook/matmul.md), fitted together: the root of the mean square error is 6.9%.
WIDE = WideRates(
    rows=65,
    l2_bandwidth=15.4e12,
    tensor_flops=0.844e15,
    # of an earlier fit; what goes into shared memory counts there, too
    sm_bytes_per_us=237e3,
    overlap=4.65,
    latency_us=1.09,
    # 192x14336x4096: 50.3 in two row tiles of 96x128, 39.2 in one of 192x64
    reread=0.776,
    tensor_efficiency=1.0,
    half_area=2.1,
    cluster_store_us=0.287,
    exchange_us_per_kb=0.0705,
    # 128 bytes a clock: 300x4096x4096 takes 24.5 with 80x128 tiles and 19.5 with 152x64
    shared_bytes_per_us=239e3,
)

#: cuBLAS, and the faster of cuDNN and FlashAttention 2 as PyTorch calls them, cold L2, plain
#: launches; the least that they need, so that kernels which are expected to be faster are
LIBRARIES = LibraryRates(
    # 2 to 16 rows by 4096x4096, 4096x6144, 4096x28672: 1.1 to 4.7 above launch and memory; 96 to
    # 512 rows: 1 to 6 above; 4096 rows and more: nothing, as the tensor cores reach 800 TFLOP/s
    product_us=1.1,
    # one query of 32 heads by 4096, 16384 and 65536 keys: 11.5, 22.8 and 66.5, 6.1, 5.9 and 3.3
    # above; with lengths, as a mask, 11.5 and more
    attention_us=3.3,
    # 2048 to 16384 causal queries: 82.3, 269, 979 and 3605, that is 56 to 81% of the peak
    attention_efficiency=0.84,
    attention_keys=400,
    # 32768x4096 to 4096x262144: softmax 2.1 to 2.5, cross entropy 2.6 to 4.7; 1.0 to 2.5 of shorter
    # rows, and of others without a maximum (benchmarks/results/training.json)
    softmax_memory=2.1,
    softmax_columns=4096,
)

#: folder of the settings measured on this architecture
SETTINGS = "sm90"

#: H200: streaming reads reach 4.35 TB/s (67.2 MB in 17.2 us, 1.8 of them fixed); L2 fitted (4096^3
#: reads 1.6 GB in 207 us, while the tensor cores are as busy); 66 / 30 / 15 clusters of 2 / 4 / 8
#: fit at one block per SM (occupancy query; of 16 as many as these counts leave room for); 788
#: TFLOP/s bf16; a further small kernel takes 1.4 to 1.6 us.
H200 = Target(
    name="h200",
    arch="sm_90a",
    sms=132,
    shared_bytes=232448,
    reserved_bytes=1024,
    sm_threads=2048,
    sm_blocks=32,
    registers=65536,
    clusters={1: 132, 2: 66, 4: 30, 8: 15, 16: 7},
    bandwidth=4.35e12,
    l2_bandwidth=8.8e12,
    tensor_flops=7.5e14,
    launch_us=1.5,
    rates=RATES,
    wide=WIDE,
    attention=ATTENTION,
    rows=ROWS,
    libraries=LIBRARIES,
    settings=SETTINGS,
)

#: H100 SXM: the same chip with 3.35 TB/s of memory (datasheet; about 90% of it is reachable).
H100 = replace(H200, name="h100", bandwidth=3.0e12)
