"""Stores of 16 bytes from the results of products, of which a thread has 4 bytes of each 16.

The four threads of a row exchange theirs first. Without that each access of a warp fills half of
its sectors of 32 bytes: 2048 causal tokens with 8 heads of 64 take 51.2 us so, and 48.8 with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cutesuper.device.fragments import fragment, transposed
from cutesuper.device.memory import neighbours
from cutesuper.skeletons.base import View

#: threads that share a row, and columns of a block, of which each has two
QUAD, BLOCK = 4, 8


def is_wide(view: View, columns: str, extent: int, itemsize: int) -> bool:
    """True if rows of ``extent`` columns, all of which a warp has, can be stored like this."""
    return itemsize == 2 and extent % (QUAD * BLOCK) == 0 and view.run(columns, BLOCK) == BLOCK


def pieces(pair: Callable[[int], cute.Tensor], blocks: int, lane: Any) -> list[cute.Tensor]:
    """The numbers of a row in every fourth block of columns: four words each.
    All lanes of a warp call it, also those whose row does not exist.

    Args:
        pair: gives the two numbers of this thread in a block, 16 bits each.
        blocks: of the row.
        lane: of the thread.
    """
    found = []
    for first in range(0, blocks, QUAD):
        words = fragment(QUAD, Int32)
        for i in range(QUAD):
            words[i] = cute.recast_tensor(pair(first + i), Int32)[0]
        found.append(transposed(words, lane))
    return found


def store(found: list[cute.Tensor], row: cute.Pointer, lane: Any) -> None:
    """Store what `pieces` has found; ``row`` is the place of the first column."""
    for n, words in enumerate(found):
        column = cute.assume(BLOCK * (QUAD * n + lane % QUAD), divby=BLOCK)
        target = neighbours(row + column, BLOCK)
        cute.autovec_copy(cute.recast_tensor(words, target.element_type), target)
