"""Programs of complex numbers: rotary embeddings as Llama has them, and what else is arithmetic on
pairs of real ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing import Case, randn

#: of 16 features of 6 positions, for any number of heads
FREQS = torch.polar(torch.ones(6, 8), randn(6, 8))


def as_complex(x: Tensor) -> Tensor:
    """Neighbours as real and imaginary part."""
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def broadcast(freqs: Tensor, x: Tensor) -> Tensor:
    """The factors, broadcast to [batch, position, head, feature]."""
    return freqs.view([n if d in (1, x.ndim - 1) else 1 for d, n in enumerate(x.shape)])


def rotary(q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with angles of their positions."""
    turned = [as_complex(t) * broadcast(freqs, as_complex(t)) for t in (q, k)]
    q_out, k_out = (torch.view_as_real(t).flatten(3) for t in turned)
    return q_out.type_as(q), k_out.type_as(k)


class Rotated(nn.Module):
    """Attention of Llama: angles are a buffer, of which a part is taken."""

    freqs: Tensor

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, n * 16, bias=False) for n in (4, 2, 2))
        self.out = nn.Linear(64, 32, bias=False)
        self.start = start
        self.register_buffer("freqs", torch.polar(torch.ones(32, 8), randn(32, 8)), False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, 16) for p in self.projections)
        q, k = rotary(q, k, self.freqs[self.start : self.start + s])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


def phases(x: Tensor, t: Tensor) -> Tensor:
    """Angles made of positions at the call."""
    angles = torch.outer(t, 10000.0 ** (-torch.arange(0, 16, 2) / 16.0))
    turned = as_complex(x) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(turned).flatten(-2)


def _real(z: Any) -> Tensor:
    return torch.view_as_real(z).flatten(-2)


def _draw(*shape: int) -> Tensor:
    return torch.complex(randn(*shape), randn(*shape).flip(-1) + 0.3)


Q, K = randn(2, 6, 4, 16), randn(2, 6, 2, 16)
POSITIONS = torch.tensor([[3, 1, 0, 5, 2, 4], [0, 1, 2, 3, 4, 5]])

COMPLEX: list[Case] = [
    ("rotary embeddings", rotary, (Q, K, FREQS)),
    ("the same of half", rotary, (Q.bfloat16(), K.bfloat16(), FREQS)),
    ("one token", rotary, (Q[:1, :1].clone(), K[:1, :1].clone(), FREQS[:1].clone())),
    ("attention of Llama", Rotated(), (randn(2, 6, 32),)),
    ("the same of half, later", Rotated(5).bfloat16(), (randn(2, 6, 32).bfloat16(),)),
    ("angles of positions", lambda x, f, p: _real(as_complex(x) * f[p][:, :, None]),
     (Q, FREQS, POSITIONS)),
    ("angles made at the call", phases, (Q, torch.arange(6.0))),
    ("turned back", lambda x, f: _real(as_complex(x) * f[:, None].conj()), (Q, FREQS)),
    ("by exponentials", lambda x, t: _real(torch.complex(*x.chunk(2, -1)) * (1j * t).exp()),
     (Q, randn(8))),
    ("numbers", lambda x: _real((as_complex(x) * (2 - 1j) + as_complex(x) / 3) * 0.5), (Q,)),
    ("real factors", lambda x, y: _real(as_complex(x) * y + y), (Q, randn(6, 4, 8))),
    ("parts", lambda x, f: ((z := as_complex(x) * f[:, None]).real.sin(), z.imag * 2), (Q, FREQS)),
    ("shapes", lambda x, f: _real((as_complex(x).transpose(1, 2).unsqueeze(-2) * f[:, None])
     .squeeze(-2).permute(0, 2, 1, 3).flip(-1)[:, 1:].sum(1)), (Q, FREQS)),
    ("put together", lambda x, f: _real(torch.cat([z := as_complex(x) * f[:, None], -z], -1)),
     (Q, FREQS)),
    ("powers", lambda z: z * z * z, (_draw(3, 8),)),
    ("a column", lambda z, c: z * c, (_draw(3, 8), _draw(3, 1))),
    ("one row", lambda z, r: z * r, (_draw(8), _draw(8).flip(0))),
    ("a number at the call", lambda x, z: _real(as_complex(x) * z), (Q, torch.tensor(1 + 2j))),
    ("sums", lambda z: (z.sum(), z.mean(0), z.sum((0, 1), keepdim=True), z.mean() * 2),
     (_draw(3, 8),)),
    ("beside real numbers", lambda z, r: (z + r, r - z, z / (r * r + 1)), (_draw(3, 8), randn(8))),
    ("of half as exponents", lambda x: torch.exp(1j * x.float()), (randn(3, 8).half(),)),
    ("repeated", lambda z: z.repeat(2, 1).T[None].expand(4, 8, 6) * 2j, (_draw(3, 8),)),
    ("nothing computed", lambda z, x: (z, torch.view_as_real(z) * x), (_draw(3, 8), randn(2))),
    ("complex results", lambda x, f: (as_complex(x) * f[:, None], x * 2), (Q, FREQS)),
]  # fmt: skip
