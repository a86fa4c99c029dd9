"""Rows of 16-bit elements that begin anywhere, on their way into shared memory.

Memory is read in aligned words of 16 bytes by asynchronous copies (`cp.async`), which need no
registers while they are on their way. A piece of 8 elements that begins between two words is then
shifted together from both.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op, select_

from cutesuper.device.fragments import PIECE, fetched, fragment, words_of
from cutesuper.device.memory import neighbours

#: bytes of a word, the most that one asynchronous copy takes
WORD_BYTES = 16


@dsl_user_op
def copy_word(
    source: cute.Pointer, target: cute.Pointer, count: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Copy the first ``count`` bytes of a word into shared memory, and zeros behind them.
    The word is there after `wait_for_words`, for the warp that has asked for it."""
    nvvm.cp_async_shared_global(
        target.to_llvm_ptr(loc=loc, ip=ip), source.to_llvm_ptr(loc=loc, ip=ip), WORD_BYTES,
        nvvm.LoadCacheModifierKind.CG, cp_size=Int32(count).ir_value(loc=loc, ip=ip),
        loc=loc, ip=ip,
    )  # fmt: skip


def end_words() -> None:
    """End a group of words that are waited for together."""
    cute.arch.cp_async_commit_group()


def wait_for_words(left: int) -> None:
    """Wait for this warp's words, but for those of the last ``left`` groups."""
    cute.arch.cp_async_wait_group(left)
    cute.arch.sync_warp()


def shifted(words: cute.Pointer, start: Any, count: Any, step: int, whole: bool) -> cute.Tensor:
    """A piece from the two words in shared memory that it lies in.

    Args:
        words: the first of them, aligned; its neighbour is the other one.
        start: first element of the piece, whose place in the first word is that modulo 8.
        count: elements of the piece that exist, if that is less than 8; zeros follow them.
        step: 1, 2 or 4: all pieces begin at multiples of it.
        whole: true if ``count`` is never between 0 and 8.
    """
    both = words_of(fetched(neighbours(words, 2 * PIECE)))
    # a bit of the distance to the first word's start at a time
    for distance in (4, 2):
        if step <= distance:
            far, pairs = (start & distance) > 0, zip(both, both[distance // 2 :], strict=False)
            both = [Int32(select_(far, b, a)) for a, b in pairs]
    if step == 1:
        bits = (start & 1) * 16
        both = [cute.arch.shf(a, b, bits, "r") for a, b in pairwise(both)]
    found = fragment(PIECE, words.dtype)
    target = cute.recast_tensor(found, Int32)
    for n in range(PIECE // 2):
        word = both[n]
        if not whole:
            word = Int32(select_(count > 2 * n + 1, word, word & 0xFFFF))
        target[n] = Int32(select_(count > (0 if whole else 2 * n), word, Int32(0)))
    return found
