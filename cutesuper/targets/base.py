"""GPU data for the search and the schedule: counts, peak rates, measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

#: architectures for whose tensor cores ``device/`` has building blocks
PRODUCTS = ("sm_90a", "sm_100a", "sm_103a")


@dataclass(frozen=True)
class AttentionRates:
    """Cost-model constants of the attention loop (`skeletons.attention.cost`), in microseconds.

    Attributes:
        streamed: bandwidth reached for keys and values, as a fraction of the target's.
        from_l2: the same fraction for L2.
        overlap: exponent of `skeletons.cost.overlapped`.
        ramp_us: barriers, the first loads and the last store of a block.
        step_us: latencies of a warpgroup for a tile of keys: both products and the softmax between
            them wait for each other.
        apart_us: the same where warpgroups with rows of their own multiply ahead.
        exps_per_us: exponentials per microsecond on one SM.
        value_reads_per_us: elements of K and V that helper warps of one SM read for values of keys.
        meet_us: joining two warpgroups along the keys, for each 1024 results of a block.
        cluster_us: joining the parts of a cluster.
        cluster_sent_us: additional time for each 1024 results of a block.
        grid_us: joining the parts of the grid.
        grid_moved_us: additional time for each 1024 results that a block leaves in memory or reads.
        late: factor on reading time where dependent launches crowd.
        crowd: clusters for each free place up to which the next launch's crowd into the places.
    """

    streamed: float
    from_l2: float
    overlap: float
    ramp_us: float
    step_us: float
    apart_us: float
    exps_per_us: float
    value_reads_per_us: float
    meet_us: float
    cluster_us: float
    cluster_sent_us: float
    grid_us: float
    grid_moved_us: float
    late: float
    crowd: float


@dataclass(frozen=True)
class RowRates:
    """Cost-model constants of rows that are visited in turn, or split, in microseconds.
    Rows are split over a cluster (`skeletons.rows.cost`).

    Attributes:
        start_us: the first tile of rows, while nothing else runs.
        visit_us: the part of a visit that nothing hides: the exchanges of a reduction.
        deep: factor on memory time with more than two stages of 32 KB in flight.
        finish_us: combining over the grid: a barrier, and the partial results.
        cluster_us: wait of a block for each other block of its cluster in an exchange.
        block_us: first loads and last stores of a cluster.
    """

    start_us: float
    visit_us: float
    deep: float
    finish_us: float
    cluster_us: float
    block_us: float


@dataclass(frozen=True)
class Rates:
    """Cost-model constants fitted to measurements; times in microseconds.

    The values and their origin are in the file of the architecture (`hopper`, `blackwell`).

    Attributes:
        sm_bytes_per_us: bytes per microsecond that one SM takes in.
        piece_bytes: scattered pieces of this many bytes take twice the time of contiguous ones.
        iteration_us: an iteration of a staged loop: barrier, descriptor, wait.
        prologue_per_us: elements that the helper warps of one SM read, compute and write back,
            where the row operand of a product is computed.
        statistic_per_us: elements that they only read, for statistics of the rows.
        overlap: exponent of `skeletons.cost.overlapped`; infinite if overlapping work takes
            no longer than its longest part.
        kept_bytes: of the weights that L2 still has when the next row tiles come.
        shared_bytes_per_us: that an SM writes to its shared memory and reads.
        scaled_reads: reads of columns that go through registers, each as one by the tensor cores.
        helper_bytes_per_us: bytes of rows per microsecond that two helper warps of an SM read from
            device memory.
        copied_bytes_per_us: bytes per microsecond that threads of one SM copy into shared memory,
            of operands that bulk loads cannot address.
        tensor_overlap: the same of the tensor cores with all else.
        latency_us: from the request of a stage until it is there, while the memory is busy.
        reread: part of the weights that comes from memory again where many row tiles read them.
        first_stage: part of the first stage that nothing hides.
        block_us: a further block of an SM: barriers, first loads.
        store_us: epilogue time of 1024 accumulators.
        cluster_store_us: the same in a cluster, where partial sums are added up before.
        exchange_us_per_kb: a cluster's exchange of partial sums, for each KB that a block sends.
        row_load_us: a value of a row that the epilogue loads.
        reduction_us: a reduction of a row kernel across its warps.
        after_product_us: a product after the loop: its row operand goes through shared memory.
        column_reduction_us, cluster_reduction_us: a reduction of accumulators along the columns,
            within a block, and the addition for a cluster.
        tensor_efficiency: fraction of the peak that the tensor cores reach with infinitely large
            accumulators.
        half_area: accumulator elements at which half of the rest is lost to operand traffic.
        vector_rows: rows that the instruction for vectors (`skeletons.matmul.plan.VectorProduct`)
            counts as.
        row_loads: rows beyond which the loads of row values hide behind each other.
        lanes_per_us: arithmetic instructions of one SM, one for each lane.
        instructions: instructions per element, by operator; 1 for operators that are not named.
    """

    sm_bytes_per_us: float
    piece_bytes: float
    iteration_us: float
    prologue_per_us: float
    statistic_per_us: float
    overlap: float
    kept_bytes: float
    shared_bytes_per_us: float
    scaled_reads: float
    helper_bytes_per_us: float
    copied_bytes_per_us: float
    tensor_overlap: float
    latency_us: float
    reread: float
    first_stage: float
    block_us: float
    store_us: float
    cluster_store_us: float
    exchange_us_per_kb: float
    row_load_us: float
    reduction_us: float
    after_product_us: float
    column_reduction_us: float
    cluster_reduction_us: float
    tensor_efficiency: float
    half_area: float
    vector_rows: int
    row_loads: int
    lanes_per_us: float
    instructions: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True)
class WideRates:
    """Constants of `Rates` and `Target` that take other values in products of many rows.
    There memory, L2, the way into a multiprocessor and its tensor cores are all busy.

    Attributes:
        rows: from which on they hold.
        l2_bandwidth, tensor_flops: as of `Target`.
        sm_bytes_per_us, overlap, latency_us, reread, tensor_efficiency, half_area,
            cluster_store_us, exchange_us_per_kb, shared_bytes_per_us: as of `Rates`; the tensor
            cores overlap like all else.
    """

    rows: int
    l2_bandwidth: float
    tensor_flops: float
    sm_bytes_per_us: float
    overlap: float
    latency_us: float
    reread: float
    tensor_efficiency: float
    half_area: float
    cluster_store_us: float
    exchange_us_per_kb: float
    shared_bytes_per_us: float


@dataclass(frozen=True)
class LibraryRates:
    """Constants of the libraries that PyTorch calls, for `targets.roofline`.

    Attributes:
        product_us: of a product of matrices beside its launch, memory and tensor cores.
        attention_us: the same of attention.
        attention_efficiency: fraction of the peak that its products reach with many keys.
        attention_keys: visible keys of a row with which they reach half of that.
        softmax_memory: time of sums behind a maximum of the same rows, over that of their memory.
        softmax_columns: elements of the shortest rows of which that holds.
    """

    product_us: float
    attention_us: float
    attention_efficiency: float
    attention_keys: float
    softmax_memory: float
    softmax_columns: int


@dataclass(frozen=True)
class Target:
    """A GPU.

    Attributes:
        name: ``h200``.
        arch: architecture given to the compiler, ``sm_90a``.
        sms: streaming multiprocessors.
        shared_bytes: shared memory that one block may have.
        reserved_bytes: shared memory that the driver takes for each block; an SM has
            ``shared_bytes`` plus this.
        sm_threads, sm_blocks: most threads and blocks of one multiprocessor.
        registers: 32-bit registers of one multiprocessor.
        clusters: blocks per cluster -> clusters that run at once with one block per SM.
        bandwidth: device memory, bytes/s, reading.
        l2_bandwidth: L2 to the SMs, bytes/s.
        tensor_flops: dense 16-bit multiply-adds (as 2 operations) per second.
        doubled: factor on it for products whose instructions take two blocks of columns
            (`skeletons.matmul.plan.MatmulPlan.doubles`), or the rows of two warpgroups
            (`skeletons.attention.schedule.AttentionSchedule.together`).
        launch_us: fixed cost of a kernel in a graph, latency of its first loads included,
            microseconds.
        rates: the fitted constants of the cost model.
        wide: those of products of many rows.
        attention: the constants of the attention loop.
        rows: the constants of rows that are visited in turn, or split over a cluster.
        libraries: the constants of kernels that are not this package's.
        settings: folder of the measured settings, below ``schedules``; see `targets.settings`.
        accumulators: most fp32 accumulators of a block where they have a memory of their own; None
            where they are registers.
        hands_out: True if blocks that run may take the work of those that have not started.
        joint: True if one instruction may multiply for two blocks of a cluster.
    """

    name: str
    arch: str
    sms: int
    shared_bytes: int
    reserved_bytes: int
    sm_threads: int
    sm_blocks: int
    registers: int
    clusters: Mapping[int, int] = field(hash=False)
    bandwidth: float
    l2_bandwidth: float
    tensor_flops: float
    launch_us: float
    rates: Rates
    wide: WideRates
    attention: AttentionRates
    rows: RowRates
    libraries: LibraryRates
    settings: str
    accumulators: int | None = None
    doubled: float = 1.0
    hands_out: bool = False
    joint: bool = False

    @property
    def sm_shared_bytes(self) -> int:
        """Shared memory of one multiprocessor, including the driver's part."""
        return self.shared_bytes + self.reserved_bytes

    def with_sms(self, sms: int) -> Target:
        """The same with this number of multiprocessors, which is a part of its name then.
        Blocks that wait for each other must all run at once. Tensor cores and L2 are a share of
        the whole, the memory is not: parts of a GPU have it together."""
        if sms == self.sms:
            return self
        clusters = {size: min(count, sms // size) for size, count in self.clusters.items()}
        w, share = self.wide, sms / self.sms
        wide = replace(w, tensor_flops=w.tensor_flops * share, l2_bandwidth=w.l2_bandwidth * share)
        return replace(
            self, name=f"{self.name}-{sms}", sms=sms, clusters=clusters, wide=wide,
            tensor_flops=self.tensor_flops * share, l2_bandwidth=self.l2_bandwidth * share,
        )  # fmt: skip

    def refuses_accumulators(self, held: int, blocks: int) -> tuple[str, str] | None:
        """A name and a reason if accumulators do not fit into their own memory; else None.
        It is given to blocks in powers of two. None also if they are registers.

        Args:
            held: numbers of 32 bits that products of a block read and write there.
            blocks: of a multiprocessor that have room at a time.
        """
        room = self.accumulators
        if room is None or blocks << (held - 1).bit_length() <= room:
            return None
        return (
            "accumulators exceed the tensor memory",
            (
                f"{held} numbers of products in a block, and {blocks} block(s) that share the room "
                f"of {self.name} for {room}, in powers of two; use a smaller tile"
            ),
        )

    def refuses_products(self) -> str | None:
        """Reason why matrix products cannot be lowered for this GPU; None if they can."""
        if self.arch in PRODUCTS:
            return None
        return (
            f"matrix products are lowered for {', '.join(PRODUCTS)}, not for "
            f"{self.name} ({self.arch})"
        )
