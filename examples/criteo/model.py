"""DLRM (arXiv:1906.00091): embeddings, a bottom MLP, dot products of all pairs, a top MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from criteo.data import CATEGORIES, PADDED

#: of tensors
Part = Callable[..., Tensor]
#: of what adapters add
SCALE = 0.5


@dataclass(frozen=True)
class Shape:
    """Extents: the layers of both MLPs, rows of each category's table, ids in a bag.

    The last layer of `bottom` is as wide as an embedding, a multiple of 8; `top` ends with one
    output.
    """

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    rows: int
    bag: int

    @property
    def width(self) -> int:
        """The width of an embedding."""
        return self.bottom[-1]

    @property
    def interactions(self) -> int:
        """The input of the top MLP: the bottom's result and all pairs, in whole multiples of 8."""
        return -(-(self.width + (CATEGORIES + 1) * CATEGORIES // 2) // 8) * 8


class DLRM(nn.Module):
    """The probability of a click; `embed`, `bottom`, `interact` and `top` are its parts."""

    below: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.table = nn.EmbeddingBag(CATEGORIES * shape.rows, shape.width, mode="sum")
        nn.init.normal_(self.table.weight, std=shape.width**-0.5)
        self.bottom = mlp((PADDED, *shape.bottom), nn.ReLU())
        self.top = mlp((shape.interactions, *shape.top), nn.Sigmoid())
        i, j = torch.tril_indices(CATEGORIES + 1, CATEGORIES + 1, -1)
        self.register_buffer("below", i * (CATEGORIES + 1) + j, persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [batch, CATEGORIES, bag] -> [batch, CATEGORIES, width]."""
        return self.table(ids.flatten(0, 1)).unflatten(0, ids.shape[:2])

    def interact(self, dense: Tensor, bags: Tensor) -> Tensor:
        """The dense vector, and the dot product of every two: [batch, interactions]."""
        every = torch.cat((dense[:, None], bags), dim=1)
        pairs = (every @ every.transpose(1, 2)).flatten(1)[:, self.below]
        return F.pad(torch.cat((dense, pairs), 1),
                     (0, self.shape.interactions - self.shape.width - len(self.below)))  # fmt: skip

    def forward(
        self, numbers: Tensor, ids: Tensor, bottom: Part | None = None, top: Part | None = None
    ) -> Tensor:
        """[batch, PADDED] and [batch, CATEGORIES, bag] -> [batch]; with other MLPs, if given."""
        bottom, top = bottom or self.bottom, top or self.top
        return top(self.interact(bottom(numbers), self.embed(ids))).squeeze(1)


def mlp(extents: Sequence[int], last: nn.Module) -> nn.Sequential:
    """Linear layers with ReLU between them, and `last` at the end."""
    layers: list[nn.Module] = []
    for inner, columns in pairwise(extents):
        layers += [nn.Linear(inner, columns), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


# ---------------------------------------------------------------------------------------- adapters

#: `(x, p, bias)` -> relu(x + SCALE p + bias)
Add = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_add(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    """The addition of LoRA to a layer, in PyTorch."""
    return F.relu(x + SCALE * p + bias)


class AdaptedTop(nn.Module):
    """A top MLP that stays as it is, with LoRA (arXiv:2106.09685) on its hidden layers."""

    def __init__(self, top: nn.Sequential, rank: int) -> None:
        super().__init__()
        for parameter in top.parameters():
            parameter.requires_grad_(False)
        *hidden, self.last = (m for m in top if isinstance(m, nn.Linear))
        self.hidden = nn.ModuleList(hidden)
        like = self.last.weight
        # neither is zero, as B is at first: so all gradients can be compared
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for layer in hidden:
            columns, inner = layer.weight.shape
            self.a.append(torch.randn(rank, inner).to(like) / inner**0.5)
            self.b.append(torch.randn(columns, rank).to(like) / rank**0.5)

    def forward(self, x: Tensor, add: Add = torch_add) -> Tensor:
        """[batch, interactions] -> probabilities [batch]."""
        for layer, a, b in zip(self.hidden, self.a, self.b, strict=True):
            x = add(F.linear(x, layer.weight), F.linear(F.linear(x, a), b), layer.bias)
        return self.last(x).sigmoid().squeeze(1)

    def loss(self, x: Tensor, clicked: Tensor, add: Add = torch_add) -> Tensor:
        """The mean of the cross entropy."""
        p = self(x, add)
        return F.binary_cross_entropy(p.to(clicked.dtype), clicked)
