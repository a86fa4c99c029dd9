"""The decisions of attention loops that measurements have made.
``schedules/*/attention.json`` has the entries and what was measured."""

from __future__ import annotations

from cutesuper.targets.settings import Decision, Settings

SETTINGS = Settings(
    "attention",
    {
        # exponentials are computed during the next product, by the rows of a block; `values`: of
        # keys, that the loop computes
        "overlap": Decision(("rows", "values"), {"overlapped": 0}),
        # keys and values are read with the evict-first hint
        "stream": Decision(("rows",), {"streamed": 0}),
        # blocks of one warpgroup that share an SM, and their stages; 1: no block does. By the rows
        # of a block, elements of the inner label, blocks of a cluster, and waves of blocks
        "resident": Decision(("rows", "depth", "cluster", "waves"), {"blocks": 1, "stages": 2}),
        # most stages of the ring
        "ring": Decision((), {"stages": 8}),
    },
)
