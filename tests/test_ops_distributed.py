"""Operators with gradients in DDP and FSDP2: two processes on the CPU, against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cutesuper as cs

torch = pytest.importorskip("torch")

RANKS = 2
KINDS = ("ddp", "fsdp", "fsdp mixed", "ddp checkpointed", "fsdp adamw")


class Block(torch.nn.Module):
    """Norm, linear layer, residual; parameters of odd sizes, so that shards are uneven."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.first = cs.nn.RMSNorm(n, eps=1e-5)
        self.up = torch.nn.Linear(n, n)
        self.second = cs.nn.LayerNorm(n)
        self.last = cs.nn.RMSNorm(n, eps=1e-5, weight_offset=1.0)

    def forward(self, x: Any) -> Any:
        y, total = self.last(self.up(self.first(x)), residual=self.second(x))
        return y + total


class Checkpointed(torch.nn.Module):
    """A module whose forward pass is computed again."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.module, x, use_reentrant=False)


def model() -> Any:
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(Block(13) for _ in range(2)))
    for p in blocks.parameters():
        torch.nn.init.normal_(p)
    return blocks


def data() -> Any:
    return torch.randn(RANKS * 6, 5, 13, generator=torch.Generator().manual_seed(1))


def wrapped(kind: str, module: Any) -> Any:
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(module)
    if kind == "ddp checkpointed":
        blocks = torch.nn.Sequential(*(Checkpointed(b) for b in module))
        return torch.nn.parallel.DistributedDataParallel(blocks)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if "mixed" in kind:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in module:
        fully_shard(block, mp_policy=policy)
    return fully_shard(module, mp_policy=policy)


def work(rank: int, folder: str) -> None:
    """One process: rank 0 writes the gradients of every kind."""
    torch.set_num_threads(1)
    # a file in place of a port, which somebody else may take between asking for it and using it
    where = (Path(folder) / "store").as_uri()
    torch.distributed.init_process_group("gloo", where, rank=rank, world_size=RANKS)
    for kind in KINDS:
        grads = trained(kind, rank)
        if rank == 0:
            torch.save(grads, Path(folder) / f"{kind}.pt")
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def trained(kind: str, rank: int) -> list[Any]:
    """Two steps of training; the gradients of the last."""
    mine = wrapped(kind, model())
    optimizer = optimizer_of(kind, mine)
    for _ in range(2):
        optimizer.zero_grad()
        mine(data().chunk(RANKS)[rank]).float().square().mean().backward()
        optimizer.step()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for p in mine.parameters()]  # fmt: skip


def optimizer_of(kind: str, module: Any) -> Any:
    """Clipped by the norm of all shards, with steps that show in the next gradients."""
    if "adamw" in kind:
        return cs.optim.AdamW(module.parameters(), lr=0.3, eps=1.0, max_norm=0.5)
    return torch.optim.SGD(module.parameters(), lr=1e-3)


def alone(kind: str) -> list[Any]:
    """The gradients of one process."""
    module = model()
    optimizer = optimizer_of(kind, module)
    for _ in range(2):
        optimizer.zero_grad()
        module(data()).square().mean().backward()
        optimizer.step()
    return [p.grad for p in module.parameters()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gradients of all kinds, from one pair of processes: starting them takes longest."""
    folder = tmp_path_factory.mktemp("gradients")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return folder


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_gradients_of_one(kind: str, written: Path) -> None:
    found = torch.load(written / f"{kind}.pt")
    for a, b in zip(found, alone(kind), strict=True):
        if "mixed" in kind:  # products in bfloat16
            assert torch.linalg.vector_norm(a - b) < 0.05 * torch.linalg.vector_norm(b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
