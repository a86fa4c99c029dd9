"""The schedules (knobs) of row kernels and row loops, and the ones chosen where none is given.

Registers and the shape of the rows decide by arithmetic; what only a measurement can decide is
looked up (`rows.settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

from cutesuper.ir.block import STORE, BlockProgram
from cutesuper.ir.dims import ceil_div
from cutesuper.skeletons.rows.settings import SETTINGS, stage_limit
from cutesuper.skeletons.schedule import Schedule, Values
from cutesuper.targets import Target

if TYPE_CHECKING:
    from cutesuper.skeletons.rows.plan import RowLoopPlan, RowPlan

WARP = 32
MAX_THREADS = 1024
#: most elements of one row that one thread holds (fp32 registers for every live value) in blocks of
#: at most 512 threads; with more threads, which have 64 registers each, half as many
MAX_PER_THREAD = 64
#: longest row that a block can hold and reduce
MAX_ROW = MAX_THREADS * MAX_PER_THREAD // 2
#: threads of a large block; two such blocks share an SM, with 64 registers per thread
LARGE = 512
#: most elements of a row that a thread of such a block has
LARGE_HELD = 32
#: most bytes of loaded rows per thread for which 64 registers are enough: LayerNorm with 32
#: elements, two vectors beside the row, needs all of them
MAX_LOADED = 192
#: most elements of all values that a thread has at the same time, of 255 registers; the rest are
#: for addresses and for intermediate values
MAX_LIVE = 192
#: longest strided rows that are read coalesced: 32 threads along the row, 64 elements each
MAX_STRIDED = WARP * MAX_PER_THREAD
#: sizes and addresses of bulk loads are multiples of this number of bytes
BULK = 16
#: most elements of a row that a thread has in slices of all rows, or if tiles are loaded straight
#: from memory to threads that have several rows
MAX_KEPT = 32
#: most elements of a row that a thread of a row loop has in any schedule
MAX_HELD = 64
#: most threads of a row loop's block, and most rows of its tile
LOOP_THREADS, MAX_TILE = 512, 128


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _floor_power(n: int) -> int:
    """The largest power of two that is at most n; 1 if n is below 1."""
    return 1 << max(0, n.bit_length() - 1) if n > 0 else 1


@dataclass(frozen=True)
class RowSchedule(Schedule):
    """Knobs of a row kernel.

    Attributes:
        lanes: threads that share one row, a power of two.
        vector: elements per memory access of a thread.
        chunks: accesses per thread and row.
        rows: rows a block computes at a time.
        interleaved: neighbouring threads take neighbouring rows, not neighbouring elements: for
            rows that are strided in memory, where this makes accesses coalesce.
    """

    kind: ClassVar[str] = "rows"
    knobs: ClassVar[dict[str, Values]] = {
        "lanes": lambda s: (s.lanes * 2, s.lanes // 2),
        "rows": lambda s: (s.rows * 2, s.rows // 2),
        "vector": lambda s: (s.vector // 2,),
        "chunks": lambda s: (s.chunks // 2,),
    }
    fixed: ClassVar[tuple[str, ...]] = ("dependent_launch", "interleaved")

    lanes: int
    vector: int
    chunks: int
    rows: int
    interleaved: bool = False

    def settled(self, old: RowSchedule, knob: str) -> RowSchedule:
        """The schedule, adjusted: rows of other lanes or vectors still cover their width."""
        if knob not in ("lanes", "vector") or not self.lanes or not self.vector:
            return self
        width = old.lanes * old.vector * old.chunks
        return replace(self, chunks=ceil_div(width, self.lanes * self.vector))

    def mistake(self, default: Any) -> str:
        """Check powers of two, whole warps, and knobs that the layout of the tensors determines."""
        usual = default.schedule
        powers = (self.lanes, self.vector, self.rows)
        if any(n < 1 or n & (n - 1) for n in powers) or self.chunks < 1:
            return "lanes, vector and rows must be powers of two, chunks at least 1"
        if self.lanes * self.rows % 32:
            return f"{self.lanes * self.rows} threads are no whole warps"
        if self.interleaved != usual.interleaved:
            return "interleaved is decided by how the tensors lie in memory"
        if usual.vector % self.vector:
            return f"the tensors are not aligned for accesses of {self.vector} elements"
        if self.interleaved and (self.lanes, self.vector) != (usual.lanes, usual.vector):
            return "interleaved rows keep their lanes and vectors"
        return ""


@dataclass(frozen=True)
class RowLoopSchedule(Schedule):
    """Knobs of a kernel that walks over rows.

    Attributes:
        lanes: threads of a block that share one row, a power of two.
        vector: elements per memory access of a thread.
        chunks: accesses per thread and row.
        groups: groups of ``lanes`` threads: rows side by side.
        depth: neighbouring rows that a group takes at a time; a tile has ``groups * depth``.
        stages: tiles of the ring in shared memory; 0 reads tiles straight into registers.
        kept: a tile is kept in registers while it is computed on; otherwise it is read from the
            ring again after every reduction.
        blocks: blocks (or clusters) that walk over the rows, if the program leaves that open; 0:
            one for each tile.
        resident: blocks that share an SM, which decides how many registers threads have: while one
            waits for an exchange or for loads, another one computes.
        sliced: sums over rows are computed in a second pass, in which each block has some columns
            of all rows, so that blocks do not meet. For few rows.
    """

    kind: ClassVar[str] = "row loop"
    knobs: ClassVar[dict[str, Values]] = {
        "lanes": lambda s: (s.lanes * 2, s.lanes // 2),
        "vector": lambda s: (),
        "chunks": lambda s: (),
        "groups": lambda s: (s.groups * 2, s.groups // 2),
        "depth": lambda s: (s.depth * 2, s.depth // 2),
        "stages": lambda s: (s.stages + 1, s.stages - 1) if s.stages else (),
        "blocks": lambda s: (s.blocks * 2, s.blocks // 2),
        "resident": lambda s: (s.resident % 3 + 1, (s.resident + 1) % 3 + 1),
    }

    lanes: int
    vector: int
    chunks: int
    groups: int
    depth: int = 1
    stages: int = 2
    kept: bool = True
    blocks: int = 132
    resident: int = 1
    sliced: bool = False

    def settled(self, old: RowLoopSchedule, knob: str) -> RowLoopSchedule:
        """The schedule, adjusted.
        Lanes cover as much of a row, and a tile keeps its threads and rows: with more lanes, or
        fewer threads, a group takes more of them. Slices are read without a ring; blocks that meet
        have one."""
        if knob == "lanes" and self.lanes:
            groups = max(1, old.lanes * old.groups // self.lanes)
            width, rows = old.lanes * old.vector * old.chunks, old.groups * old.depth
            chunks = ceil_div(width, self.lanes * self.vector)
            return replace(self, chunks=chunks, groups=groups, depth=max(1, rows // groups))
        if knob == "groups" and self.groups:
            return replace(self, depth=max(1, old.groups * old.depth // self.groups))
        if knob == "sliced":
            return replace(self, stages=0 if self.sliced else 2, kept=True)
        return self

    def mistake(self, default: Any) -> str:
        """Check the number of blocks, which a program with sums over rows has decided."""
        usual = default.schedule
        fixed = default.sums and not self.sliced and not usual.sliced
        if fixed and self.blocks != usual.blocks:
            return f"the program says that {usual.blocks} blocks walk over the rows"
        return ""


# ------------------------------------------------------------------------------------- row kernels


def default_rows(plan: RowPlan, target: Target) -> RowSchedule:
    """The schedule of a row kernel whose own is not known yet."""
    reduces = bool(plan.reductions or plan.scans)
    contiguous = [v for v in plan.views if v.contiguous(plan.column)]
    if reduces and not contiguous and plan.part <= MAX_STRIDED and not plan.scans:
        lanes = min(WARP, power_of_two(ceil_div(plan.part, 32)))
        chunks = ceil_div(plan.part, lanes)
        rows = SETTINGS.choose(target, "strided", held=chunks)["rows"]
        return RowSchedule(lanes, 1, chunks, rows, interleaved=True)
    vector = _vector(plan)
    if plan.turns:
        return _turning(plan, target, vector)
    if not reduces and any(v.strided(plan.column) for v in plan.views):
        # a transposition: a warp reads a piece of 32 neighbouring rows, and each thread writes its
        # own 16 bytes
        lanes = min(8, power_of_two(ceil_div(plan.length, vector)))
        chunks = min(2, ceil_div(plan.length, lanes * vector))
        return RowSchedule(lanes, vector, chunks, 32, interleaved=True)
    vector, accesses = _accesses(plan, target, vector)
    threads = _setting(plan, target, "row_threads")["threads"]
    lanes = min(threads, power_of_two(ceil_div(plan.part, vector * accesses)))
    lanes = lanes if reduces else _strip(plan.length, vector, lanes)
    chunks = ceil_div(plan.part, lanes * vector)
    chunks = chunks if reduces else min(accesses, chunks)
    return RowSchedule(lanes, vector, chunks, _rows_of_a_block(plan, target, lanes, accesses))


def _turning(plan: RowPlan, target: Target, vector: int) -> RowSchedule:
    """Rows of one warp or less, whose halves begin at a vector: elements move by one shuffle.
    Those that move within a vector need none."""
    vector = gcd(vector, *(n for n in plan.turns if n >= vector))
    lanes = min(WARP, power_of_two(ceil_div(plan.length, vector)))
    chunks = ceil_div(plan.length, lanes * vector)
    return RowSchedule(lanes, vector, chunks, _rows_of_a_block(plan, target, lanes, chunks))


def _setting(plan: RowPlan, target: Target, decision: str, **more: float) -> Mapping[str, Any]:
    """The measured knobs of a decision about a row kernel."""
    features = {
        "reduced": bool(plan.reductions or plan.scans),
        "length": plan.part,
        "rows_per_sm": plan.row_count * plan.parts / target.sms,
        **more,
    }
    return SETTINGS.choose(target, decision, **features)


def _accesses(plan: RowPlan, target: Target, vector: int) -> tuple[int, int]:
    """Elements of an access, and accesses of a thread to a row of each tensor.
    As measured, as far as all values that live at a time fit into the registers."""
    vectors = sum(v.labels == (plan.column,) for v in plan.views)
    loaded = plan.loaded_bytes(LARGE_HELD)
    found = _setting(plan, target, "accesses", vectors=vectors, loaded_bytes=loaded)
    accesses = found["elements"] // vector or found["accesses"]
    if not (plan.reductions or plan.scans):  # the compiler computes one element after the other
        return vector, accesses

    def halved(most: int) -> bool:
        """True if twice as many threads, at most as many as given, can have half as much each."""
        return 2 * ceil_div(plan.part, vector * accesses) <= most

    at_once = _setting(plan, target, "at_once")["elements"]
    inputs = sum(plan.column in v.labels for v in plan.loads.values())
    while at_once and accesses > 1 and vector * accesses * inputs > at_once and halved(LARGE - 1):
        accesses //= 2
    # the gradient of 20 operators around a softmax spilled 2304 bytes with 32 elements of each
    live = live_values(plan.program, plan.column)
    while vector * accesses * live > MAX_LIVE and vector * accesses > 1 and halved(LARGE):
        vector, accesses = (vector, accesses // 2) if accesses > 1 else (vector // 2, 1)
    return vector, accesses


def _rows_of_a_block(plan: RowPlan, target: Target, lanes: int, accesses: int) -> int:
    """Rows of a block: full warps, as many threads as measured, but not fewer blocks than SMs."""
    threads = _setting(plan, target, "block_threads", accesses=accesses)["threads"]
    rows = max(1, threads // lanes)
    while rows > max(1, WARP // lanes) and ceil_div(plan.row_count * plan.parts, rows) < target.sms:
        rows //= 2
    return rows


def live_values(program: BlockProgram, column: str) -> int:
    """The most values along the rows that are live at the same time, in the program's order."""
    last = {j: i for i, op in enumerate(program.ops) for j in op.inputs}
    alive, most = set[int](), 1
    for i, op in enumerate(program.ops):
        if column in op.dims and op.kind != STORE:
            alive.add(i)
        most = max(most, len(alive))
        alive -= {j for j in op.inputs if last[j] == i}
    return most


def _strip(length: int, vector: int, lanes: int) -> int:
    """Lanes of blocks that divide rows of an element-wise program into strips.
    The last one reaches past the end as little as possible: 4096x14336 in strips of 4096 elements,
    the last one half empty, took 90.6 us while the memory takes 81.4."""

    def covered(n: int) -> int:
        strip = n * vector * min(2, ceil_div(length, n * vector))
        return ceil_div(length, strip) * strip

    return min((lanes, max(32, lanes // 2), max(32, lanes // 4)), key=lambda n: (covered(n), -n))


def _vector(plan: RowPlan) -> int:
    """Elements per access: 16 bytes of the widest type, as far as row lengths allow.
    Tensors that are strided along the row are read element by element in any case."""
    contiguous = [v for v in plan.views if v.contiguous(plan.column)]
    widest = max(map(plan.itemsize, contiguous or plan.views))
    places = [n for v in contiguous for n in v.places]
    return gcd(BULK // widest, plan.length, *places) if contiguous else 1


# --------------------------------------------------------------------------------------- row loops


def default_loop(plan: RowLoopPlan, target: Target) -> RowLoopSchedule:
    """The schedule of a row loop whose own is not known yet.
    Slices of all rows, a block for each tile, or blocks that walk."""
    smallest = min([plan.itemsize(plan.loads[i]) for i in plan.streamed], default=2)
    vector = BULK // smallest if plan.bulk else _common_vector(plan, BULK // smallest)
    found = _sliced(plan, target, vector) or _straight(plan, target, vector)
    return _whole_warps(plan, found or _walking(plan, target, vector))


def _walking(plan: RowLoopPlan, target: Target, vector: int) -> RowLoopSchedule:
    """Blocks (or clusters) that walk over tiles, through a ring if bulk loads can bring them."""
    row_bytes = max(1, sum(plan.row_bytes.values()))
    resident = SETTINGS.choose(
        target, "resident", clustered=plan.cluster > 1, summed=bool(plan.sums),
        vectors=len(plan.vectors), written=plan.writes_rows, row_bytes=row_bytes,
    )["resident"]  # fmt: skip
    walkers = plan.walkers or resident * _at_once(plan, target)
    stage = stage_limit(target)
    fair = power_of_two(max(1, ceil_div(plan.row_count, walkers)))
    # without a ring only the tile is requested: as much of it as two stages have
    most = stage if plan.bulk else 2 * stage
    tile_rows = max(1, min(_floor_power(most // row_bytes), fair, MAX_TILE))
    threads = LOOP_THREADS if row_bytes * tile_rows > stage // 2 else LOOP_THREADS // 2
    pieces = ceil_div(plan.width, vector)
    lanes = min(threads, power_of_two(ceil_div(pieces, 2)))
    if plan.sums:
        threads = _summing_threads(plan, target, lanes, walkers) or threads
    chunks = ceil_div(pieces, lanes)
    groups = max(1, min(tile_rows, threads // lanes))
    depth = max(1, tile_rows // groups)
    if not plan.bulk:  # a thread requests all of its rows at once
        requested = SETTINGS.choose(target, "requested")["rows"]
        depth = max(1, min(depth, requested, MAX_KEPT // (resident * vector * chunks)))
    schedule = RowLoopSchedule(
        lanes, vector, chunks, groups, depth, 0, blocks=walkers, resident=resident
    )
    return _with_ring(replace(plan, schedule=schedule), target) if plan.bulk else schedule


def _with_ring(plan: RowLoopPlan, target: Target) -> RowLoopSchedule:
    """The schedule of a plan without ring, with one of as many stages as fit and help."""
    s = plan.schedule
    ring = SETTINGS.choose(target, "ring")
    kept = plan.held * s.resident * plan.threads <= ring["registers"]
    kept = kept and s.vector * s.chunks * s.depth <= MAX_HELD
    stage = plan.tile_rows * sum(plan.row_bytes.values())
    least = SETTINGS.choose(target, "stages", kept=kept, stage_bytes=stage)["stages"]
    room = (target.shared_bytes - ring["reserved"]) // (s.resident * max(1, stage))
    wanted = max(least, 2 * stage_limit(target) // max(1, stage))
    return replace(s, stages=max(1, min(room, wanted, ring["stages"])), kept=kept)


def _summing_threads(plan: RowLoopPlan, target: Target, lanes: int, walkers: int) -> int:
    """Most threads of a block that adds up rows; 0 if there is no such limit."""
    summed = [v for v in plan.stores.values() if not plan.varies(v)]
    return SETTINGS.choose(
        target, "summing", lanes=lanes, sums=len(plan.sums),
        result_bytes=max(map(plan.itemsize, summed), default=2),
        rows_per_block=plan.row_count / walkers,
    )["threads"]  # fmt: skip


def _straight(plan: RowLoopPlan, target: Target, vector: int) -> RowLoopSchedule | None:
    """A block (or cluster) for each tile, whose rows are loaded straight to registers.
    None if threads would not hold them, or a ring is faster."""
    if plan.sums or not plan.bulk:
        return None
    found = SETTINGS.choose(
        target, "straight", clustered=plan.cluster > 1, reduced=bool(plan.complete),
        length=plan.width, vectors=len(plan.vectors), written=plan.writes_rows,
    )  # fmt: skip
    pieces = ceil_div(plan.width, vector)
    accesses = max(1, found["accesses"] // max(1, len(plan.streamed)) or found["each"])
    lanes = power_of_two(ceil_div(pieces, accesses))
    if not found["straight"] or lanes > LOOP_THREADS // 2:
        return None
    # enough rows for all threads, but not fewer blocks than SMs
    groups = max(1, found["threads"] // lanes)
    while groups * lanes > max(lanes, WARP) and ceil_div(plan.row_count, groups) < target.sms:
        groups //= 2
    chunks, resident = ceil_div(pieces, lanes), found["resident"]
    return RowLoopSchedule(lanes, vector, chunks, groups, stages=0, blocks=0, resident=resident)


def _sliced(plan: RowLoopPlan, target: Target, vector: int) -> RowLoopSchedule | None:
    """A slice of columns for every block, for few rows; None if blocks had better meet, or must."""
    rows = plan.row_count
    if not plan.sums or not SETTINGS.choose(target, "sliced", rows=rows)["sliced"]:
        return None
    walkers = max(1, target.sms // max(1, plan.outer_count))
    found = SETTINGS.choose(target, "slice", rows_per_block=rows / walkers)
    pieces = ceil_div(plan.width, vector)
    lanes = min(found["threads"], power_of_two(pieces))
    chunks = ceil_div(pieces, lanes)
    groups = max(1, LOOP_THREADS // 2 // lanes)
    depth = found["rows"] if rows > walkers * groups else 1
    sliced = RowLoopSchedule(lanes, vector, chunks, groups, depth, 0, blocks=walkers, sliced=True)
    fits = vector * chunks * depth <= MAX_KEPT
    return sliced if fits and replace(plan, schedule=sliced).unsliced is None else None


def _whole_warps(plan: RowLoopPlan, s: RowLoopSchedule) -> RowLoopSchedule:
    """The schedule adjusted to short and few rows.
    At least a warp, a lane for every block of the cluster to send to, and whole pieces of 4 columns
    of summed values."""
    lanes = max(s.lanes, min(WARP, power_of_two(plan.cluster)), 4 if plan.sums else 1)
    chunks = min(s.chunks, ceil_div(plan.width, lanes * s.vector))
    groups = max(WARP, s.lanes * s.groups) // lanes
    return replace(s, lanes=lanes, chunks=chunks, groups=max(1, groups))


def _at_once(plan: RowLoopPlan, target: Target) -> int:
    """Number of clusters (or blocks) that run at the same time with one block on every SM."""
    clusters = target.clusters.get(plan.cluster, target.sms // plan.cluster)
    return max(1, clusters // plan.column_parts)


def _common_vector(plan: RowLoopPlan, vector: int) -> int:
    """Elements that every access along a row may take at a time."""
    views = [v for v in (*plan.loads.values(), *plan.stores.values()) if plan.column in v.labels]
    return min((v.run(plan.column, vector, plan.length, plan.width) for v in views), default=vector)
