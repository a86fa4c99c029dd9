"""Train the model of train_llama.py on one device, with DDP and with FSDP2: the same losses.

    torchrun --nproc-per-node 2 examples/train_distributed.py
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel fsdp2 --way ours+compile

One process per GPU, with NCCL; where there is no GPU, or with --device cpu, they talk over Gloo.
The batch is divided among the processes. Before that each of them trains on the whole batch by
itself, from the same weights: what a single device gives.

The exit status is 1 if the loss curves differ by more than the tolerance.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from llama import options, report
from llama.model import Llama
from llama.training import WAYS, Plan, Result, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def main() -> int:
    """All runs in every process; the first process prints."""
    parser, args = arguments()
    if "LOCAL_RANK" not in os.environ:
        parser.error("not started by torchrun: torchrun --nproc-per-node 2 " + sys.argv[0])
    device = own_device(parser, args)
    plan = options.plan(parser, args, device)
    world = int(os.environ["WORLD_SIZE"])
    if plan.batch % world:
        parser.error(f"--batch {plan.batch}: must be a multiple of the {world} processes")
    results = [replace(train(plan, args.way), way="one device")]
    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        results += [parallel(plan, args.way, name) for name in args.parallel]
        rank = dist.get_rank()
    finally:
        dist.destroy_process_group()
    same, sentence = report.agreement(plan, results)
    if rank == 0:
        show(args, plan, results, same, sentence)
    return 0 if same else 1


def parallel(plan: Plan, way: str, name: str) -> Result:
    """Train with all processes; losses are those of the whole batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = train(plan, way, lambda model: PARALLEL[name](model, plan.device), rank, world)
    losses = torch.tensor(own.losses, dtype=torch.float64, device=plan.device)
    dist.all_reduce(losses)
    return replace(own, way=f"{name} on {world}", losses=(losses / world).tolist())


def show(
    args: argparse.Namespace, plan: Plan, results: list[Result], same: bool, sentence: str
) -> None:
    """Print, in one process for all of them."""
    print(f"{args.way}: {report.describe(plan)}")
    print(report.table(plan, results))
    for k in range(0, plan.steps, max(1, plan.steps // 5)):
        print(f"step {k + 1:3}: " + ", ".join(f"{r.way} {r.losses[k]:.5f}" for r in results))
    print(sentence)
    if args.json:
        report.write_json(args.json, plan, results, same)


def arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The arguments of the command line."""
    parser = options.parser(__doc__ or "")
    parser.add_argument(
        "--parallel", nargs="+", choices=list(PARALLEL), default=list(PARALLEL),
        help="default: both",
    )  # fmt: skip
    parser.add_argument("--way", choices=list(WAYS), default="ours", help="default: ours")
    return parser, parser.parse_args()


def own_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> torch.device:
    """The device of this process."""
    if args.device == "cpu":
        return torch.device("cpu")
    local, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= found:
        parser.error(f"process {local} has no GPU of its own: there are {found}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def ddp(model: Llama, device: torch.device) -> nn.Module:
    """A whole model on every device; gradients are averaged."""
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def fsdp2(model: Llama, device: torch.device) -> nn.Module:
    """Every device keeps a part of each weight; layers are put together when they are needed."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


PARALLEL: dict[str, Callable[[Llama, torch.device], nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2}


def leave(status: int) -> NoReturn:
    """End the process without the interpreter's own clearing up.

    DTensor's caches keep the mesh of FSDP2, and so Gloo's threads, beyond the end of the process
    group. One that lets go of its last tensor while the interpreter ends aborts the process: on
    two busy processors one run in four, after all losses were printed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
