"""Labels between two products of one kernel, ``(X A) B``: what a block can hold of them.

The search offers what the schedule can plan.
"""

from __future__ import annotations

from cutesuper.ir.dims import ceil_div

#: elements of a hidden label that a block holds: 256 of 64 rows are 32 KB of shared memory, and 128
#: registers of each thread of a warpgroup while they are accumulated
MAX_HIDDEN = 256
#: columns of a box in shared memory; the swizzles of 32, 64 and 128 bytes
_WIDTHS = (16, 32, 64)


def hidden_width(extent: int, narrow: bool) -> int:
    """Columns of a hidden label that are staged.

    The tensor-core instruction takes 64. Of a short label it may read what lies behind, whose
    products nobody looks at: padding 16 columns to 64 took 13.5 us where 16 take 11 (16x4096x4096,
    rank 16), and 16.9 where they are stored (16, 4096).

    Args:
        extent: of the label.
        narrow: whether something large enough to be read lies behind.
    """
    if narrow and extent <= _WIDTHS[-1]:
        return next(w for w in _WIDTHS if w >= extent)
    return 64 * ceil_div(extent, 64)
