"""A maximum m of a row's values t and the sum of exp(t - m), in one exchange in place of two.

before: ``max t`` of a thread, warp, block and cluster, then the same of ``sum exp(t - max t)``;
after: each block of a cluster takes its own maximum and the sum below it (in one block each warp
does), and pairs travel; `online` has the formula. Lanes merge pairs, one each, so that a thread
computes one exponential for a merge.

Where a tile is kept and only its exponentials are needed again, these take its place, below the own
maximum. What asks for them later is given them times ``exp(own maximum - that of the row)``, a
factor of the row, which is multiplied by other factors of the row before by elements.

The maxima of a block's warps travel with the barrier that shows that its tile has been read. The
load of the next tile follows it, then the exponentials, which depend on what is read after it:
where they depended on shuffles alone, the compiler put 64 of them in front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass.cute as cute

from cutesuper.device.fragments import combine, computed_once
from cutesuper.lower.online import base

if TYPE_CHECKING:
    from cutesuper.lower.row_loop import RowLoopKernel
    from cutesuper.schedule.row_loop import Level


class Pairs:
    """What is exchanged as pairs, for one kernel."""

    def __init__(self, kernel: RowLoopKernel) -> None:
        self.k = kernel
        self.plan = kernel.plan
        #: reductions that make the maximum of a pair
        self.tops = frozenset(self.plan.pairs.values())
        #: whether parts of a row are those of blocks, not of warps
        self.in_block = self.plan.tops_meet

    def of(self, level: Level) -> list[int]:
        """The sums of a level that are exchanged with their maxima."""
        return [i for i in level.reductions if i in self.plan.pairs]

    def power(self, i: int) -> int:
        """The exponential that a sum is of."""
        return self.plan.program.ops[i].inputs[0]

    def meet(self, n: int, it: Any, partial: dict[tuple[int, int], Any], smem: dict[str, Any],
              place: dict[str, Any]) -> None:
        """Maxima of the thread become those of its warp; when it returns, the block has been told
        of them, and at level 0 everybody has read its tile."""
        for i, r in [key for key in partial if key[0] in self.tops]:
            partial[i, r] = self.k.exchange.warp("max", partial[i, r])
            if self.in_block:
                self.k.exchange.leave(n, i, r, it, partial[i, r], smem, place)
        if self.in_block or (n == 0 and self.k.tiles.stages):
            cute.arch.sync_threads()

    def take(self, n: int, it: Any, partial: dict[tuple[int, int], Any], smem: dict[str, Any],
             place: dict[str, Any]) -> None:
        """They become those of the block, where its warps have left theirs."""
        for i, r in [key for key in partial if key[0] in self.tops]:
            if self.in_block:
                partial[i, r] = self.k.exchange.of_block(n, i, r, it, smem, place)

    def add(self, level: Level, partial: dict[tuple[int, int], Any], rows: list[dict[str, Any]],
            known: list[dict[int, Any]], tensors: list[cute.Tensor], place: dict[str, Any],
            vectors: dict[int, Any]) -> None:
        """The thread's sums, below these maxima."""
        from cutesuper.lower.row_loop import Values

        k, plan = self.k, self.plan
        for r, row in enumerate(rows):
            own = dict(known[r])
            for i in self.of(level):
                top = plan.pairs[i]
                own[plan.complete[top]] = base(partial[top, r], k.math)
            for p in range(k.chunks // k.piece):
                values = Values(k, row, p, own, tensors, place, vectors)
                for i in self.of(level):
                    if plan.keeps_exps(i):
                        power = self.power(i)
                        row["exps"][power] = values.found[power] = computed_once(values.of(power))
                    x = k.reduced(i, values, p, place)
                    old = partial.get((i, r))
                    partial[i, r] = x if old is None else combine("sum", old, x)

    def settle(self, level: Level, reduced: dict[tuple[int, int], Any],
               rows: list[dict[str, Any]], known: list[dict[int, Any]]) -> None:
        """What exponentials that are kept have to be multiplied by, once the row is known; of the
        maximum itself, not of its `base`: a warp of -inf has zeros, and exp(0 - m) may be inf."""
        for i in [i for i in self.of(level) if self.plan.keeps_exps(i)]:
            top = self.plan.pairs[i]
            for r, row in enumerate(rows):
                whole = known[r][self.plan.complete[top]]
                row["factors"][self.power(i)] = self.k.math.exp(reduced[top, r] - whole)


__all__ = ["Pairs"]
