"""Maxima and sums of exponentials, put together from parts of a row as the row loop's lowering puts
them together, with the same formula (`lower.online`): against PyTorch's softmax in float64."""

from __future__ import annotations

from functools import partial
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from cutesuper.lower.online import base, merged  # noqa: E402 (tests skip without torch)


class TorchMath:
    """The namespace of scalar functions over tensors."""

    exp = torch.exp

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        return torch.where(condition, torch.as_tensor(x, dtype=y.dtype), y)


def butterfly(combine: Any, x: Any) -> Any:
    """What the lanes of a warp have, combined in all of them: x[..., lane], a power of two."""
    lanes = torch.arange(x.shape[-1])
    distance = x.shape[-1] // 2
    while distance:
        x = combine(x, x[..., lanes ^ distance])
        distance //= 2
    return x


def shares(x: Any, blocks: int, lanes: int) -> tuple[Any, Any, Any]:
    """Softmax of rows x[M, N], its maximum and sum, as blocks of ``lanes`` threads compute it.

    Elements past the end are in no thread; the sums of a block are of exponentials below its own
    maximum, and merged by lanes, of which those without a block have the pair that adds nothing.
    """
    m, n = x.shape
    width = -(-n // (blocks * lanes)) * lanes
    inside = torch.arange(blocks * width).reshape(blocks, width) < n
    t = torch.full((m, blocks * width), nan, dtype=x.dtype)  # what nobody may use
    t[:, :n] = x
    t = t.reshape(m, blocks, width)
    top = torch.where(inside, t, -inf).amax(-1)
    e = torch.exp(t - base(top, TorchMath)[..., None])
    total = torch.where(inside, e, 0.0).sum(-1)
    wide = 1 << (blocks - 1).bit_length()
    pad = partial(torch.nn.functional.pad, pad=(0, wide - blocks))
    whole, added = merged(
        pad(top, value=-inf), pad(total, value=0.0), partial(butterfly, torch.maximum),
        partial(butterfly, torch.add), TorchMath,
    )  # fmt: skip
    for v in (whole, added):  # lanes agree
        assert torch.equal(v.nan_to_num(-1.0), v[..., :1].nan_to_num(-1.0).expand_as(v))
    factor = torch.exp(top - whole[..., :blocks])[..., None]
    y = (e * (factor * (1.0 / added[..., :1, None]))).reshape(m, -1)[:, :n]
    return y, whole[..., 0], added[..., 0]


def check(x: Any, blocks: int, lanes: int) -> None:
    y, top, total = shares(x, blocks, lanes)
    want = x.double().softmax(-1)
    # an exponent of 1000 is rounded by 3e-5 in float32
    single = x.dtype is torch.float32
    close: Any = {"rtol": 1e-4 if single else 1e-9, "atol": 1e-30 if single else 1e-300}
    close["equal_nan"] = True
    torch.testing.assert_close(y.double(), want, **close)
    torch.testing.assert_close(top, x.amax(-1), rtol=0, atol=0, equal_nan=True)
    exact = torch.exp(x.double() - x.double().amax(-1, keepdim=True)).sum(-1)
    torch.testing.assert_close(total.double(), exact, **close)


NUMBERS = st.one_of(
    st.floats(-1000, 1000), st.sampled_from((inf, -inf, nan, 0.0, -0.0, 3e38, -3e38)),
    st.just(-inf),
)  # fmt: skip


@given(
    rows=st.integers(1, 50).flatmap(
        lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    blocks=st.integers(1, 9), lanes=st.sampled_from((1, 2, 4)), wide=st.booleans(),
)  # fmt: skip
def test_parts_put_together(
    rows: list[list[float]], blocks: int, lanes: int, wide: bool
) -> None:
    """Parts may be all -inf, or have no elements at all."""
    check(torch.tensor(rows, dtype=torch.float64 if wide else torch.float32), blocks, lanes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("blocks", "lanes"), [(1, 4), (2, 4), (3, 1), (8, 2), (16, 1)])
def test_rows_of_infinities(blocks: int, lanes: int, dtype: Any) -> None:
    """Of -inf alone: NaN, as in PyTorch; in some parts alone: nothing."""
    n = 50
    x = torch.randn(8, n, dtype=dtype, generator=torch.Generator().manual_seed(1))
    x[0] = -inf
    x[1, :-1] = -inf
    x[2, 1:] = -inf
    x[3, 20] = inf
    x[4, :20], x[4, 20] = -inf, inf
    x[5, 49] = nan
    x[6, ::2] = -inf
    y, _, total = shares(x, blocks, lanes)
    assert [bool(row.isnan().all()) for row in y] == [True, False, False, True, True, True,
                                                      False, False]
    assert total[1] == total[2] == 1
    check(x, blocks, lanes)


def test_a_base_that_is_never_infinite_below() -> None:
    """Without it a part of -inf would make the row NaN, and one below -88 overflow at 0."""
    assert base(torch.tensor([-inf, 3.0, inf]), TorchMath).tolist() == [0.0, 3.0, inf]
    assert base(torch.tensor([nan]), TorchMath).isnan()
    check(torch.tensor([[-inf, -inf, -200.0, -300.0]]), 2, 1)
