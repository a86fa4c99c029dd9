"""Cost model of attention loops with plain sums, in microseconds.

Rates and causes are those of `skeletons.attention.cost`: tensor cores, exponentials and other work
on scores, bytes that an SM takes in, latencies of a tile, and blocks that a mask makes shorter.
"""

from __future__ import annotations

from heapq import heapreplace

from cutesuper.ir.dims import ceil_div
from cutesuper.ir.dtypes import as_dtype
from cutesuper.ir.operators.base import CONSTANT
from cutesuper.skeletons.attention.plan import ROW_BLOCK
from cutesuper.skeletons.attention.sums.plan import Sight, SumsPlan
from cutesuper.skeletons.cost import Cost, bytes_moved, overlapped
from cutesuper.targets import Target

#: bytes of operands per microsecond that the tensor cores of an SM read: 128 per cycle at 1.75 GHz
OPERAND_BYTES = 128 * 1750
#: numbers of scores that an SM stores in a microsecond. Counted, not measured: an instruction of a
#: warp stores 32 of them in 8 rows, a row in a cycle at 1.75 GHz
STORED_NUMBERS = 4 * 1750
#: blocks per SM, one after the other, from which on it does not matter that some are shorter
EVEN_ROUNDS = 8


def price(plan: SumsPlan, target: Target) -> Cost:
    """Cost of a planned kernel."""
    busy = _turns_us(plan, target)
    itemsizes = {a.name: as_dtype(a.dtype).itemsize for a in plan.arguments}
    moved = bytes_moved(plan.program, itemsizes)
    rates = target.attention
    memory = moved / (target.bandwidth * rates.streamed) * 1e6
    loaded = sum(loops(plan)) * plan.stage_bytes * plan.turns * batches(plan)
    l2 = loaded / (target.l2_bandwidth * rates.from_l2) * 1e6
    parts = {"launch": target.launch_us, "blocks": busy, "memory": memory, "l2": l2}
    return Cost(target.launch_us + overlapped(rates.overlap, busy, memory, l2), parts)


def batches(plan: SumsPlan) -> int:
    """Blocks with the same tile of rows."""
    return plan.program.blocks() // len(loops(plan))


def loops(plan: SumsPlan) -> list[int]:
    """Tiles of a walk over the loop for each tile of rows, the longest first."""
    rows, tile = plan.program.tile[plan.rows], plan.loop_tile
    found = list[int]()
    for n in range(ceil_div(plan.extent(plan.rows), rows)):
        first, last = n * rows, min((n + 1) * rows, plan.extent(plan.rows)) - 1
        low, high = 0, plan.extent(plan.loop)
        for sight in (s for s in plan.sights if not s.mask.limits):  # others are known at the call
            low, high = max(low, _begin(plan, sight, first)), min(high, _end(plan, sight, last))
        found.append(max(0, ceil_div(high, tile) - low // tile))
    return sorted(found, reverse=True)


def _offset(plan: SumsPlan, sight: Sight) -> int:
    """The offset of a mask; symbolic extents count with their hint, lengths as the whole."""
    mask = sight.mask
    added, taken = (plan.extent(d) if d else 0 for d in (mask.added, mask.taken))
    columns = plan.extent(plan.rows if sight.across else plan.loop)
    return mask.offset + added - taken + (columns if mask.lengths is not None else 0)


def _begin(plan: SumsPlan, sight: Sight, row: int) -> int:
    return row + 1 - _offset(plan, sight) if sight.across and sight.mask.rows else 0


def _end(plan: SumsPlan, sight: Sight, row: int) -> int:
    if sight.across:
        return plan.extent(plan.loop)
    return _offset(plan, sight) + (row if sight.mask.rows else 0)


def _turns_us(plan: SumsPlan, target: Target) -> float:
    """Time of all blocks, where the next in order begins as soon as one has ended."""
    lengths, slots = loops(plan), target.sms
    times = [_block_us(plan, target, n) for n in lengths for _ in range(batches(plan))]
    if len(times) > EVEN_ROUNDS * slots:
        return sum(times) / slots
    busy = [0.0] * slots
    for us in times:
        heapreplace(busy, busy[0] + us)
    return max(busy)


def _block_us(plan: SumsPlan, target: Target, tiles: int) -> float:
    """Time of a block with this many tiles in each walk."""
    rates, groups = target.attention, plan.schedule.row_groups
    tensor, lanes = _tile_us(plan, target)
    ahead = max(tensor, lanes) if plan.schedule.overlapped else tensor + lanes
    step = rates.step_us + max(groups * tensor, ahead)
    return rates.ramp_us + plan.turns * tiles * step


def _tile_us(plan: SumsPlan, target: Target) -> tuple[float, float]:
    """Time of a warpgroup's products on a tile, and of the work between them.
    Both operands of a score come from shared memory, which takes longer than a product of narrow
    tiles."""
    area, r = ROW_BLOCK * plan.loop_tile, target.rates
    rate = target.tensor_flops * r.tensor_efficiency / target.sms / 1e6
    read = plan.element_bytes * (ROW_BLOCK + plan.loop_tile) / OPERAND_BYTES
    each = max(2.0 * area / rate, read)
    tensor = each * sum(plan.width(s.inner) for s in plan.scores)
    tensor += 2.0 * area / rate * sum(plan.width(s.columns) for s in plan.sums)
    ops = [plan.program.ops[i] for i in plan.between]
    ops = [op for op in ops if op.kind != CONSTANT and not op.facets.masks]
    exps = sum(op.facets.exponential for op in ops)
    lanes = area * (exps / target.attention.exps_per_us + (len(ops) - exps) / r.lanes_per_us)
    return tensor, lanes + area * len(plan.stores) / STORED_NUMBERS
