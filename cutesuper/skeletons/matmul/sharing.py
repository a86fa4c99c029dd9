"""Row tiles that neighbouring blocks load together; search and schedule use the same rule."""

from __future__ import annotations

from cutesuper.ir.dims import ceil_div

#: rows of a tile from which blocks share and walk; smaller tiles were not measured
LARGE_TILE = 128
#: larger groups do not pay: 30 clusters of 4 leave 12 of 132 multiprocessors without work
PAIR = 2


def rows_shared_by(rows: int, columns: int, products: int, column_tiles: int) -> int:
    """Number of blocks that load a row tile together, for a tile of ``rows`` x ``columns`` whose
    kernel does not split the contracted label over its clusters.

    At 300, 512, 1024 and 4096 rows (K = N = 4096): 31.1, 35.0, 56.9 and 215.3 us alone, 30.3, 33.7,
    54.8 and 209.0 in pairs, with two helper warps except the first three.
    """
    two_warpgroups = rows * columns * products > 64 * 128 and columns % 128 == 0
    empty = PAIR * ceil_div(column_tiles, PAIR) - column_tiles
    worth = rows >= LARGE_TILE and two_warpgroups and empty <= column_tiles // 8
    return PAIR if worth else 1
