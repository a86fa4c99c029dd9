"""The table of GPUs: complete, consistent, and found by name."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from cutesuper.errors import DeviceError
from cutesuper.ir.operators.base import lookup
from cutesuper.targets import B200, H200, TARGETS, Rates, WideRates, find_target


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_targets_are_consistent(target):
    assert find_target(target.name) is target
    for size, count in target.clusters.items():
        assert size * count <= target.sms
    for name in (f.name for f in fields(Rates) if f.name != "instructions"):
        found = getattr(target.rates, name)
        assert found > 0 or (name in ("latency_us", "reread") and found == 0), name
    for f in fields(WideRates):
        assert getattr(target.wide, f.name) > 0, f.name
    assert target.refuses_products() is None
    for operator, count in target.rates.instructions.items():
        known = lookup(operator)
        assert known.elementwise or known.reduces or known.scans
        assert count > 1  # 1 is what the others cost


def test_rates_tell_targets_apart():
    other = replace(H200, rates=replace(H200.rates, iteration_us=0.05))
    assert other != H200
    assert len({other, H200, replace(H200)}) == 2


def test_unknown_targets_are_named():
    with pytest.raises(DeviceError, match="target 'a100': unknown; use one of h200, h100, b200"):
        find_target("a100")


def test_products_are_refused_where_no_building_blocks_are():
    consumer = replace(B200, name="rtx5090", arch="sm_120a")
    assert "not for rtx5090 (sm_120a)" in str(consumer.refuses_products())
