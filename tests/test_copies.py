"""Operands that threads copy, because bulk loads cannot address them: plans, prices, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from cutesuper.errors import ScheduleError
from cutesuper.report import plan_text
from cutesuper.skeletons.matmul.cost import price
from cutesuper.skeletons.matmul.plan import MatmulPlan
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.targets import H200
from tests.chains import Chain
from tests.plans import Linear


def copied(plan: MatmulPlan) -> list[str]:
    """Names of the operands that threads copy."""
    return [plan.arguments[v.argument].name for v in plan.copied.values()]


@pytest.mark.parametrize(
    ("linear", "names"),
    [
        (Linear(), []),
        (Linear(k=520, n=200, transposed=True), []),
        (Linear(n=252), ["W"]),
        (Linear(k=500), ["X"]),
        (Linear(k=500, n=252), ["X", "W"]),
        (Linear(n=252, transposed=True), []),  # only the results have odd rows
        (Linear(k=500, transposed=True), ["X", "W"]),
        (Linear(64, 501, 256, 64, norm=False, turned=True), []),
        (Linear(61, 501, 256, 64, norm=False, turned=True), ["X"]),
    ],
)
def test_only_what_bulk_loads_cannot_address_is_copied(linear: Linear, names: list[str]) -> None:
    plan = linear.plan()
    assert copied(plan) == names
    assert bool(plan.copiers) == bool(names)
    assert plan.bulk_bytes + sum(t.bytes for t in plan.copied_tiles.values()) == plan.stage_bytes
    assert ("copied by threads" in plan_text("k", plan)) == bool(names)


def test_operands_along_hidden_labels() -> None:
    assert copied(Chain(rank=12).plan()) == ["A"]
    assert copied(Chain(rank=12, n=60).plan()) == ["W", "A", "B"]
    assert copied(Chain(rank=12, transposed=True).plan()) == ["B"]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_blocks_have_512_threads_and_their_registers(large: bool, norm: bool) -> None:
    tile = {"m": 256, "tile_m": 256, "tile_n": 128, "tile_k": 64}
    size: dict[str, Any] = tile if large else {}
    plan = Linear(k=500, n=252, norm=norm, **size).plan()
    assert plan.threads == 512 and plan.shared_bytes <= H200.shared_bytes
    if large:
        consumers, helpers, others = plan.registers or (0, 0, 0)
        shares = (helpers, others) if norm else (others, others)
        assert 256 * consumers + 128 * sum(shares) <= H200.registers


def test_copies_have_a_price() -> None:
    plain, odd = price(Linear(n=256).plan(), H200), price(Linear(n=255).plan(), H200)
    assert odd.total > plain.total and odd.parts["copies"] > 0 and "copies" not in plain.parts


def test_blocks_that_copy_neither_walk_nor_share() -> None:
    size: dict[str, Any] = {"m": 4096, "k": 4096, "tile_m": 128, "tile_n": 128, "tile_k": 64}
    size["norm"] = False
    assert Linear(n=4096, **size).plan().schedule.persistent
    odd = Linear(n=4095, **size)
    assert not odd.plan().schedule.persistent and odd.plan().schedule.share_rows == 1
    schedule = MatmulSchedule(stages=3, warpgroups=2, share_rows=2)
    with pytest.raises(ScheduleError, match="threads copy W; use 1 and 0"):
        odd.plan(schedule=schedule)


def test_what_leaves_in_pieces() -> None:
    pieces = [Linear(n=n).plan().store_piece for n in (256, 252, 254, 255)]
    assert pieces == [8, 4, 2, 1]
    assert not Linear(n=252, m=64, tile_m=64, norm=False).plan().schedule.bulk_store
