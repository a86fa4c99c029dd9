"""``cutesuper::within(Tensor index, int first, int end, int? other) -> Tensor``: checked indices.
Calls that the reference executor runs have it.

A kernel reads nothing outside of its tensors and makes rows of NaN of wrong indices. Without a GPU
they are an error, as in PyTorch.
"""

from __future__ import annotations

import torch

from cutesuper.errors import RangeError


def _within(index: torch.Tensor, first: int, end: int, other: int | None = None) -> torch.Tensor:
    wrong = index[(index < first) | (index >= end)]
    wrong = wrong if other is None else wrong[wrong != other]
    if wrong.numel():
        raise RangeError(
            f"index {int(wrong[0])} is out of bounds: there are {end} rows, and PyTorch takes "
            f"{first} to {end - 1} here; correct the indices, or make the table larger"
        )
    return index.clone()


_library = torch.library.Library("cutesuper", "FRAGMENT")
_library.define(
    "within(Tensor index, int first, int end, int? other=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("within", _within, "CPU")
torch.library.register_fake(
    "cutesuper::within", lambda index, first, end, other=None: torch.empty_like(index), lib=_library
)

within = torch.ops.cutesuper.within.default
