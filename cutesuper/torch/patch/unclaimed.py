"""Parts of a model that nothing here replaces, by their layers: MLPs without a gate, experts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise, takewhile

from torch import nn
from torch.nn.parameter import is_lazy

from cutesuper.torch.patch.report import Entry

_PLAIN = (
    "it has no gate, and only gated MLPs have a program here; torch.compile(model, "
    "backend='cutesuper') takes its products where that is faster"
)
_EXPERTS = "the rows of each expert are known only at the call, and no program here takes that"


def unclaimed(model: nn.Module, claimed: Collection[str]) -> list[Entry]:
    """Records of such parts.

    Args:
        model: to be patched.
        claimed: paths of the modules that were recognized as something.
    """
    found = [Entry(path, "MLP", why=_PLAIN) for path in _plain_mlps(model, claimed)]
    for path, module in model.named_modules():
        known = [p for p in module.parameters(recurse=False) if not is_lazy(p)]
        counts = [p.shape[0] for p in known if p.dim() == 3]
        if len(counts) > 1 and set(counts) != {1} and len(set(counts)) == 1:
            found.append(Entry(path, type(module).__name__, why=_EXPERTS))
    return found


def _plain_mlps(model: nn.Module, claimed: Collection[str]) -> Iterator[str]:
    """Paths of two layers one after the other, to more features and back."""
    layers = [(path, extents) for path, m in model.named_modules() if (extents := _extents(m))]
    for (first, one), (second, other) in pairwise(layers):
        if one != other[::-1] or one[1] <= one[0]:
            continue
        both = zip(first.split("."), second.split("."), strict=False)
        path = ".".join(a for a, _ in takewhile(lambda p: p[0] == p[1], both))
        if not any(path == c or path.startswith(f"{c}.") for c in claimed):
            yield path


def _extents(module: nn.Module) -> tuple[int, int] | None:
    """Features that a layer takes and makes; None for another module.
    (The weight of ``Conv1D`` of transformers is a linear layer's, transposed.)"""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None
