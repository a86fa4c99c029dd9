"""The memory of tensors between kernels: some lie where others lay that nothing reads any more.

before: ``logits``, ``d_logits = f(logits)``, ``copy = d_logits^T`` in three places; after: the
first two in one, if the kernel of f works in place (`cutesuper.skeletons.base.Plan.in_place`).

Kernels of a program run one after the other on one stream, and read and write such tensors only
when the kernel before has ended, so memory may be used again by the next kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: two tensors by their places among all tensors of a program
Pair = tuple[int, int]


@dataclass(frozen=True)
class Use:
    """The tensors of one launch, by their places in the program.

    Attributes:
        reads, writes: tensors.
        in_place: pairs of a tensor that is read and one that may be written in its memory.
    """

    reads: frozenset[int]
    writes: frozenset[int]
    in_place: frozenset[Pair]


def homes(uses: Sequence[Use], sizes: dict[int, object]) -> dict[int, int]:
    """The tensors that lie in the memory of another one, with the first tensor that lay there.

    Args:
        uses: of the launches, in order.
        sizes: of the tensors between kernels, by place; tensors of equal sizes may share memory.
    """
    last = {p: n for n, use in enumerate(uses) for p in use.reads | use.writes}
    found: dict[int, int] = {}
    holder: dict[int, int] = {}  # the last tensor in each memory, by its first tensor
    for n, use in enumerate(uses):
        for p in sorted(use.writes & sizes.keys()):
            free = (
                home
                for home, q in holder.items()
                if sizes[p] == sizes[home]
                and (last[q] < n or (last[q] == n and (q, p) in use.in_place))
            )
            home = next(free, p)
            if home != p:
                found[p] = home
            holder[home] = p
    return found


def overwritten(uses: Sequence[Use], place: int, by: int) -> bool:
    """True if ``by`` may be written to the memory of ``place``, which nothing reads afterwards."""
    last = max(n for n, use in enumerate(uses) if place in use.reads)
    touched = [n for n, use in enumerate(uses) if by in use.reads | use.writes]
    return touched == [last] and (place, by) in uses[last].in_place
