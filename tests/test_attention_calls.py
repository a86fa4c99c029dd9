"""Random calls of `cs.ops.attention`, and those that once failed; see `tests.fuzz.attention`."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.attention import Call, drawn, main, outcome

#: two groups of rows share a tile that ends behind a length; masks with pages, norms and windows;
#: the gradient of a bias in float16, whose kernels tests/test_attention_masks.py runs
CALLS = {
    "cleared once": Call(batch=2, rows=70, causal=True, lengths=(3, 8)),
    "bias and pages": Call(heads=2, group=2, rows=20, keys=64, causal=True, page=32, lengths=(41,),
                           mask="float32", along=(0, 1, 1)),
    "bias, norms and a window": Call(group=2, rows=33, keys=40, causal=True, norms=True, window=9,
                                     mask="bfloat16", along=(0, 0, 1), tokens=True),
    "gradient of a bias": Call(batch=2, group=2, rows=20, keys=33, dtype=torch.float16, causal=True,
                               mask="float16", along=(0, 1, 1), gradients=True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_numbers(name: str) -> None:
    made = outcome(CALLS[name], "cpu")
    assert made.kind == "right", made


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.parametrize("name", [n for n in CALLS if n != "gradient of a bias"])
def test_kernels(name: str) -> None:
    made = outcome(CALLS[name], "cuda")
    assert made.kind == "right", made


@pytest.mark.filterwarnings("ignore")
def test_random_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "60", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "'right': " in said and "refused: " in said


def test_a_call_is_that_of_its_number() -> None:
    assert drawn(3, 5, False) == drawn(3, 5, False) != drawn(3, 6, False)
