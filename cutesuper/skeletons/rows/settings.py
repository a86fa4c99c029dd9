"""The decisions of row kernels that measurements have made.
``schedules/*/rows.json`` has the entries and what was measured."""

from __future__ import annotations

from cutesuper.targets import Target
from cutesuper.targets.settings import Decision, Settings

SETTINGS = Settings(
    "rows",
    {
        # a row of an SM-resident kernel is walked over in tiles, one to a block, in place of being
        # held by one block; by the number of tensors with rows
        "long": Decision(("tensors", "length"), {"walk": 0}),
        # a cluster shares a row that one block could hold
        "cluster": Decision(("tensors", "length", "written", "vectors"), {"share": 0}),
        # bytes of a row, of all tensors with rows, that a block of a cluster has at most
        "part": Decision(("written", "aligned"), {"bytes": 32768}),
        # bytes of a stage of the ring, of all tensors with rows
        "stage": Decision((), {"bytes": 32768}),
        # accesses of a thread to a row, or else the elements that it has
        "accesses": Decision(
            ("reduced", "length", "vectors", "rows_per_sm", "loaded_bytes"),
            {"accesses": 2, "elements": 0},
        ),
        # elements of all operands that a thread requests before its first reduction
        "at_once": Decision(("reduced", "rows_per_sm"), {"elements": 0}),
        # most threads that share a row
        "row_threads": Decision(("reduced", "length"), {"threads": 512}),
        # threads of a block that has several rows
        "block_threads": Decision(("rows_per_sm", "accesses"), {"threads": 128}),
        # blocks complete sums over rows by themselves: each has some columns of all rows
        "sliced": Decision(("rows",), {"sliced": 0}),
        "slice": Decision(("rows_per_block",), {"threads": 512, "rows": 1}),
        # a block or cluster for each tile, loaded straight to registers. Accesses of a thread to
        # all operands, or else to each of them
        "straight": Decision(
            ("clustered", "reduced", "length", "vectors", "written"),
            {"straight": 0, "accesses": 0, "each": 1, "threads": 256, "resident": 2},
        ),
        # blocks on an SM if they walk over rows; bytes of a row that a block has
        "resident": Decision(
            ("clustered", "summed", "vectors", "written", "row_bytes"), {"resident": 1}
        ),
        # rows of a block that are strided in memory, by the elements that a thread holds
        "strided": Decision(("held",), {"rows": 32}),
        # most rows that a thread requests at a time, without a ring
        "requested": Decision((), {"rows": 8}),
        # most stages of the ring; bytes of shared memory that it leaves, to exchanges, barriers and
        # L1; registers of an SM for tiles that threads keep, and for sums over rows: longer tiles
        # are read again from the ring
        "ring": Decision((), {"stages": 3, "reserved": 16384, "registers": 32768}),
        # fewest stages of the ring
        "stages": Decision(("kept", "stage_bytes"), {"stages": 2}),
        # most threads of a block that sums over rows, by the threads that a row would have, the
        # number of sums, and the largest element of a result; 0: no further limit
        "summing": Decision(("lanes", "sums", "result_bytes", "rows_per_block"), {"threads": 0}),
    },
)


def stage_limit(target: Target) -> int:
    """Most bytes of a tile of rows, of all tensors that have rows, if it has several."""
    return SETTINGS.choose(target, "stage")["bytes"]


def walks_long(target: Target, tensors: int, length: int) -> bool:
    """True if rows of ``length`` elements of so many tensors are a tile each, in a row loop."""
    return bool(SETTINGS.choose(target, "long", tensors=tensors, length=length)["walk"])
