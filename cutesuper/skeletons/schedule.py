"""The knobs of a kernel that do not change what it computes: frozen dataclasses, stored as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from cutesuper.errors import FormatError


@dataclass(frozen=True)
class MatmulSchedule:
    """Knobs of a matmul-loop kernel.

    Attributes:
        stages: slots of the shared-memory ring.
        warpgroups: consumer warpgroups; each owns every n-th block of 64 columns.
        head: stages the producer fills before the block's first barrier. On 16x4096x4096 the
            first loads leave 0.2 us earlier with 4 than with 0; more than 6 delays the barrier.
        dependent_launch: launch before the predecessor in the stream has ended; constant inputs
            are loaded before the dependency wait.
        stream_columns: read the column operands with the evict-first hint: weights are read once
            and should not push activations out of L2 (0.3 us on 16x4096x4096).
        share_rows: neighbouring blocks along the columns that form a cluster and load the row
            tile, which they all need, together: each a part, multicast to all. 209.0 us at
            4096x4096x4096 in pairs of blocks that walk, 215.3 alone. Sharing column tiles along
            the rows took 215.4, and leaves the statistics with every block.
        persistent: blocks that are launched and walk the tiles; 0 launches a block for each tile.
            At 2048x4096x4096 109.0 us, 118.6 with a block for each tile: loads of the next tile
            hide the epilogue.
        helpers: warps that reduce row statistics or compute the row operand. With 2, the producer
            is in their warpgroup, and 384 threads in place of 512 keep 168 registers each.
        bulk_store: tiles leave through bulk stores of pieces of 32 rows and 64 columns. At
            300x4096x4096 31.1 us, 32.9 through the ring; elsewhere equal. Blocks that walk need
            it, since their ring holds the next tile by then.
    """

    stages: int
    warpgroups: int = 1
    head: int = 4
    dependent_launch: bool = False
    stream_columns: bool = True
    share_rows: int = 1
    persistent: int = 0
    helpers: int = 4
    bulk_store: bool = False


@dataclass(frozen=True)
class RowSchedule:
    """Knobs of a row kernel.

    Attributes:
        lanes: threads that share one row, a power of two.
        vector: elements per memory access of a thread.
        chunks: accesses per thread and row.
        rows: rows a block computes at a time.
        interleaved: neighbouring threads take neighbouring rows, not neighbouring elements: for
            rows that are strided in memory, where this makes accesses coalesce.
        dependent_launch: launch before the predecessor in the stream has ended.
    """

    lanes: int
    vector: int
    chunks: int
    rows: int
    interleaved: bool = False
    dependent_launch: bool = False


@dataclass(frozen=True)
class RowLoopSchedule:
    """Knobs of a kernel that walks over rows.

    Attributes:
        lanes: threads of a block that share one row, a power of two.
        vector: elements per memory access of a thread.
        chunks: accesses per thread and row.
        groups: groups of ``lanes`` threads: rows side by side.
        depth: neighbouring rows that a group takes at a time; a tile has ``groups * depth``.
        stages: tiles of the ring in shared memory; 0 reads tiles straight into registers.
        kept: a tile is kept in registers while it is computed; otherwise it is read from the ring
            again after every reduction.
        blocks: blocks (or clusters) that walk over the rows, where the program leaves it open; 0:
            one for each tile.
        resident: blocks that share an SM, which decides how many registers threads have: while one
            waits for an exchange or for loads, another one computes.
        sliced: sums over rows are computed a second time, each block some columns of all rows:
            blocks do not meet. For few rows.
        dependent_launch: launch before the predecessor in the stream has ended.
    """

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
    dependent_launch: bool = False


@dataclass(frozen=True)
class AttentionSchedule:
    """Knobs of an attention-loop kernel.

    Attributes:
        stages: slots of the ring, each for a tile of keys and one of values.
        row_groups: consumer warpgroups along the rows, 64 rows each.
        key_groups: consumer warpgroups along the keys: they take stages in turn, so that one
            computes exponentials while the other one multiplies.
        overlapped: multiply the next tile's rows and keys before this tile's values, so that
            exponentials are computed during a product.
        resident: blocks that share an SM.
        stream_keys: read keys and values with the evict-first hint.
        dependent_launch: launch before the predecessor in the stream has ended.
    """

    stages: int
    row_groups: int = 1
    key_groups: int = 2
    overlapped: bool = False
    resident: int = 1
    stream_keys: bool = True
    dependent_launch: bool = False


Schedule = MatmulSchedule | RowSchedule | RowLoopSchedule | AttentionSchedule
_KINDS: dict[str, type[Schedule]] = {
    "matmul": MatmulSchedule,
    "rows": RowSchedule,
    "row loop": RowLoopSchedule,
    "attention": AttentionSchedule,
}


def schedule_dict(schedule: Schedule) -> dict[str, Any]:
    """A schedule as a plain dictionary with its kind."""
    kind = next(k for k, cls in _KINDS.items() if isinstance(schedule, cls))
    return {"kind": kind, **asdict(schedule)}


def read_schedule(data: Any) -> Schedule:
    """Read what `schedule_dict` made. Raises FormatError."""
    kind = data.get("kind") if isinstance(data, dict) else None
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise FormatError(f"schedule: 'kind' must be one of {', '.join(_KINDS)}")
    wanted = {f.name: f.type for f in fields(cls)}
    given = {k: v for k, v in data.items() if k != "kind"}
    if set(given) != set(wanted):
        odd = ", ".join(sorted(set(given) ^ set(wanted)))
        raise FormatError(f"{cls.__name__}: missing or unknown fields: {odd}")
    for name, value in given.items():
        kind = bool if wanted[name] == "bool" else int
        if type(value) is not kind or (kind is int and value < 0):
            raise FormatError(f"{cls.__name__}: {name}={value!r} is not a {kind.__name__}")
    return cls(**given)
