"""The hand-written attention programs of `tests.attention` compute their graphs."""

from __future__ import annotations

from typing import Any

import pytest

from cutesuper.verify.numeric import compare
from tests.attention import Attention

SMALL: dict[str, Any] = {"rows": 6, "keys": 40, "width": 8, "key_tile": 8, "row_tile": 4}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keys last": {"keys_last": True, "scale": None},
    "groups": {"group": 3},
    "groups alone": {"group": 3, "rows": 0},
    "causal": {"causal": "top_left"},
    "causal, last rows": {"causal": "bottom_right", "group": 2},
    "norms": {"norm": "QV", "keys_last": True, "scale": None},
    "norm of keys": {"norm": "QK", "group": 2},
    "ragged": {"keys": 37},
}


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_programs_by_hand(form: str, cluster: int) -> None:
    options: dict[str, Any] = SMALL | FORMS[form] | {"cluster": cluster}
    attention = Attention(**options)
    report = compare(attention.graph(), attention.mugraph())
    assert report, report.message
