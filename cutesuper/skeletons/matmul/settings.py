"""The decisions of matmul loops that measurements have made.
``schedules/*/matmul.json`` has the entries and what was measured."""

from __future__ import annotations

from cutesuper.targets.settings import Decision, Settings

SETTINGS = Settings(
    "matmul",
    {
        # the fewest and the most rows of tiles worth a price, which are divided evenly, of equal
        # costs the fewest; 0: the smallest that covers the rows, which few rows are not divided for
        "rows": Decision(("rows",), {"least": 0, "most": 0}),
        # the same where rows are divided because the columns are not, or because more products
        # follow: as far as the smallest tile that covers the rows. Their order was not measured
        "divided": Decision((), {"tiles": (8, 16, 32, 64, 256, 128)}),
        # tiles of columns and of the contracted label worth a price, in multiples of 64
        "columns": Decision((), {"tiles": (64, 128, 192, 256)}),
        "depth": Decision((), {"tiles": (64, 128, 192, 256)}),
        # bytes that are kept in flight, if `stages` are not more; 0: as many as fit
        "ring": Decision(("dependent_launch", "rows"), {"bytes": 0, "stages": 2}),
        # stages that the producer fills before the block's first barrier
        "ahead": Decision((), {"stages": 0}),
        # by the rows and accumulators of a tile, if helper warps read its stages (or operands are
        # float32), and if blocks walk: neighbouring blocks along the columns that load rows
        # together, where there are `full` tiles at least for each that the last cluster lacks
        "share": Decision(("rows", "reads", "walks", "accumulators"), {"blocks": 1, "full": 1}),
        # helper warps of blocks with large tiles, by the rows that a block loads of each
        "helpers": Decision(("prologue", "rows"), {"warps": 4}),
    },
)
