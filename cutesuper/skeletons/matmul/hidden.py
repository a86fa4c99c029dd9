"""Labels between two products of one kernel, ``(X A) B``, and their limits in a block.

The search and the schedule share these limits.
"""

from __future__ import annotations

from cutesuper.ir.dims import ceil_div

#: most elements of a hidden label that a block holds: 256 for 64 rows are 32 KB of shared memory,
#: and 128 registers of each thread of a warpgroup while they are accumulated
MAX_HIDDEN = 256
#: columns of a box in shared memory, for the swizzles of 32, 64 and 128 bytes
_WIDTHS = (16, 32, 64)


def hidden_width(extent: int, narrow: bool) -> int:
    """Number of columns of a hidden label that are staged.

    The WGMMA instruction takes 64. For a short label it may read the memory behind it, as those
    products are never used: padding 16 columns to 64 took 13.5 us where 16 take 11 (16x4096x4096,
    rank 16), and 16.9 where they are stored (16, 4096).

    Args:
        extent: extent of the label.
        narrow: True if enough readable memory lies behind the label.
    """
    if narrow and extent <= _WIDTHS[-1]:
        return next(w for w in _WIDTHS if w >= extent)
    return 64 * ceil_div(extent, 64)
