"""A process in which tensors of the CPU stand for those of a GPU, and the machine runs the kernels.

    with emulated_gpu():
        kernel = cutesuper.superoptimize(graph)
        kernel(x, w)                     # runs the PTX; device="cuda" makes tensors of the CPU

It serves `pytest --ptx`, which runs the tests that are marked ``gpu`` without a GPU. What it cannot
stand for (streams, CUDA graphs, time) skips the test that asks for it, by name.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from cutesuper.ir.dims import extent
from cutesuper.ir.dtypes import as_dtype
from tests.ptx.run import Conditions, executable, fake_device, run_launch

#: instructions of warps in one launch; a kernel of 4096^3 has some 10^8
LIMIT = 3 * 10**8


class Emulated:
    """One compiled kernel to call with tensors of the CPU, as the loaded one is.

    Attributes:
        numbers: of the launches, which run in the order that their number draws.
    """

    numbers = itertools.count()

    def __init__(self, step: Any) -> None:
        plan = step.plan
        self._artifact = step.artifact
        # of one tensor a part may be read, and another one written
        made = {a.given for a in plan.arguments if a.written}
        self._written = [a.given in made for a in plan.arguments] + [True] * len(plan.scratch)
        self._in_place = plan.in_place
        sizes = [
            prod(map(extent, a.shape[1:])) * as_dtype(a.dtype).itemsize for a in plan.arguments
        ]
        self._rows = [n * a.scattered for n, a in zip(sizes, plan.arguments, strict=True)]
        self._zeroed = [False] * len(plan.arguments) + [s.zeroed for s in plan.scratch]

    def __call__(self, *tensors: Any) -> None:
        """Run it; raises PtxError for what no kernel may do, TooLarge beyond `LIMIT`."""
        kernel = executable(self._artifact.ptx)
        written = self._written.copy()
        for i, o in self._in_place:
            written[i] |= tensors[i].data_ptr() == tensors[o].data_ptr()
        memory = [m for n, t in enumerate(tensors) for m in self._memory(n, t, written[n])]
        for launch in fake_device().launches(self._artifact, tensors):
            number = next(Emulated.numbers)
            # every launch in another order, every second one with products as late as they may be
            run_launch(
                kernel, launch, memory, Conditions(number + 1, bool(number % 2), limit=LIMIT)
            )
        for t, zeroed in zip(tensors, self._zeroed, strict=True):
            assert not (zeroed and t.any()), "a kernel left something in zeroed scratch memory"

    def _memory(self, n: int, t: torch.Tensor, written: bool) -> list[tuple[int, int, bool]]:
        """Address, bytes, and if it is written, of the memory behind argument n: of a tensor, or of
        addresses and the rows that lie there."""
        if n >= len(self._rows) or not self._rows[n]:
            return [(t.data_ptr(), _span(t), written)]
        return [(t.data_ptr(), _span(t), False), *((a, self._rows[n], written) for a in t.tolist())]


def _span(t: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size() if t.numel() else 0


class _CpuForCuda(TorchFunctionMode):
    """Makes tensors of the CPU where tensors of a GPU are asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch.Tensor.cuda:
            return args[0]
        moved = [_on_cpu(a) for a in args]
        if func is torch.device and moved and isinstance(moved[0], torch.device):
            return moved[0]  # the name has become the device already
        return func(*moved, **{k: _on_cpu(v) for k, v in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and value.split(":")[0] == "cuda"
    if named or (isinstance(value, torch.device) and value.type == "cuda"):
        return torch.device("cpu")
    return value


class _Generator(torch.Generator):
    """A generator of the CPU, whatever device is asked for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, _on_cpu(device))


def _missing(name: str) -> type:
    class Missing:
        """Skips the test that makes one; a class, since annotations name some of them."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            import pytest

            pytest.skip(f"torch.cuda.{name}: the machine of tests/ptx has none")

    return Missing


_NOTHING = {
    "synchronize": None, "empty_cache": None, "current_device": None, "is_available": True,
    "is_initialized": True, "is_current_stream_capturing": False, "device_count": 1,
    "manual_seed": None,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
}  # fmt: skip
_MISSING = ("Stream", "CUDAGraph", "graph", "_sleep", "current_stream", "stream", "Event",
            "max_memory_allocated", "reset_peak_memory_stats", "memory_allocated",
            "default_stream")  # fmt: skip


def _allot(memory: Any, values: Sequence[Any]) -> list[Any]:
    """Scratch memory of one call: the zeros that earlier calls left, or what shows if it is read
    before it is written."""
    lengths = tuple(n.elements(values) for n in memory._needs)
    needs = list(zip(memory._needs, lengths, strict=True))
    if lengths not in memory._kept:
        zeros = [torch.zeros(m, dtype=n.dtype) for n, m in needs if n.zeroed]
        memory._kept[lengths] = zeros, sum(z.nbytes for z in zeros)
    zeroed = iter(memory._kept[lengths][0])
    return [next(zeroed) if n.zeroed else _poisoned(m, n.dtype) for n, m in needs]


def _poisoned(length: int, dtype: torch.dtype) -> Any:
    return torch.full((length,), torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max,
                      dtype=dtype)  # fmt: skip


def no_workers(requests: Sequence[Any], *_: Any) -> list[None]:
    """Leave all kernels to this process: a worker starts slower than a small kernel compiles."""
    return [None] * len(requests)


@contextlib.contextmanager
def emulated_gpu(name: str = "h200") -> Iterator[None]:
    """Let the machine of `tests.ptx` be the GPU of this process. CuTe DSL must not be imported.

    Args:
        name: of the target that it is.
    """
    fake_device()
    from cutesuper.runtime import compile as compiling
    from cutesuper.runtime import programs
    from cutesuper.runtime.kernel import Variant
    from cutesuper.runtime.resources import arch_number
    from cutesuper.runtime.scratch import ScratchMemory
    from cutesuper.targets import find_target

    target = find_target(name)
    capability = divmod(arch_number(target.arch), 10)
    told = {"get_device_name": f"NVIDIA {name.upper()}", "get_device_capability": capability}
    told["get_device_properties"] = SimpleNamespace(multi_processor_count=target.sms)
    with contextlib.ExitStack() as stack:
        for function, value in (_NOTHING | told).items():
            stack.enter_context(patch.object(torch.cuda, function, lambda *a, _v=value, **k: _v))
        for function in _MISSING:
            stack.enter_context(patch.object(torch.cuda, function, _missing(function)))
        stack.enter_context(patch.object(torch.cuda, "device", lambda d: contextlib.nullcontext()))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        stack.enter_context(patch.object(torch._C, "_cuda_getDevice", lambda: None, create=True))
        functions = property(lambda variant: tuple(Emulated(s) for s in variant.steps))
        stack.enter_context(patch.object(Variant, "functions", functions))
        stack.enter_context(patch.object(ScratchMemory, "allot", _allot))
        stack.enter_context(patch.object(compiling, "run_in_workers", no_workers))
        stack.enter_context(_CpuForCuda())
        programs.KERNEL_DEVICES.add("cpu")
        stack.callback(programs.KERNEL_DEVICES.discard, "cpu")
        yield


__all__ = ["LIMIT", "Emulated", "emulated_gpu", "no_workers"]
