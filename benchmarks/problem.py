"""The tensors of one measured case: enough distinct input sets to keep the L2 cache cold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, prod

import torch

from benchmarks.check import Expected, measure_error
from benchmarks.workload import Computation, Outputs, Shape, TensorSpec, Workload

TARGET_BYTES = 512 * 10**6
ALIGNMENT = 256  # bytes; that of allocators, and more than any kernel requires
#: elements of a tensor that are computed in float64 at a time
PIECE_ELEMENTS = 2**25


@dataclass(frozen=True)
class SetPlan:
    """The number of input sets; ``flush``: they do not exceed L2, evict it by other means."""

    count: int
    set_bytes: int
    flush: bool


def plan_sets(
    set_bytes: int, l2_bytes: int, memory_bytes: int, *, least: int = 64, most: int = 256
) -> SetPlan:
    """Choose the number of sets of ``set_bytes`` within ``memory_bytes``.

    Enough to exceed max(3 x L2, 512 MB), within ``least`` .. ``most`` (more launches per replay
    also dilute the cost of starting it).

    Raises:
        MemoryError: not even one set fits.
    """
    if set_bytes > memory_bytes:
        raise MemoryError(
            f"one input set needs {set_bytes / 1e6:.0f} MB and {memory_bytes / 1e6:.0f} MB may be "
            "used; choose a smaller shape"
        )
    target = max(3 * l2_bytes, TARGET_BYTES)
    wanted = min(max(ceil(target / set_bytes), least), most)
    count = min(wanted, memory_bytes // set_bytes)
    return SetPlan(count, set_bytes, flush=count * set_bytes < target)


@dataclass
class Problem:
    """One workload at one shape: inputs and outputs of every set, and their expected values.

    ``slabs[i]`` is the memory (uint8) of all tensors of set ``i``; the floor kernel streams it.
    """

    workload: Workload
    shape: Shape
    dtype: torch.dtype
    dtype_name: str
    multiprocessors: int
    plan: SetPlan
    slabs: list[torch.Tensor]
    inputs: list[Outputs]
    outputs: list[Outputs]
    checked: tuple[int, ...]
    _rows: torch.Tensor | None = None
    _expected: dict[tuple[str, int], list[Expected]] = field(default_factory=dict)

    @property
    def bytes_moved(self) -> int:
        """Bytes one call must move."""
        return self.workload.bytes_moved(self.shape, self.dtype)

    def expected(self, computation: str, index: int) -> list[Expected]:
        """Reference outputs of set ``index``, computed once from the inputs as first drawn."""
        key = (computation, index)
        if key not in self._expected:
            self._expected[key] = self._reference(computation, index)
        return self._expected[key]

    def expect(self, computation: str, index: int, expected: list[Expected]) -> None:
        """Judge set ``index`` by these values, if its inputs alone do not determine them."""
        self._expected[computation, index] = expected

    def _reference(self, name: str, index: int) -> list[Expected]:
        computation = self.workload.computations[name]
        references = list(computation.reference(*self._exact(index, self._rows)))
        outputs = self.workload.outputs_of(name, self.shape)
        if self._rows is not None and any(spec.summed for spec in outputs):
            sums = self._summed(computation, index)
            references = [
                s if spec.summed else r
                for spec, r, s in zip(outputs, references, sums, strict=True)
            ]
        peers = computation.eager(*self.inputs[index])
        expected = []
        for spec, reference, peer in zip(outputs, references, peers, strict=True):
            rows = self._rows if spec.rows else None
            error = measure_error(peer if rows is None else peer[rows], reference)
            expected.append(Expected(reference, error, spec.dims, peer.dtype, rows, spec.wider))
        return expected

    def _exact(self, index: int, rows: torch.Tensor | slice | None) -> list[torch.Tensor]:
        """The inputs of a set in float64; only these rows of tensors with rows."""
        specs = self.workload.inputs(self.shape)
        picked = (
            t[rows] if spec.rows and rows is not None else t
            for spec, t in zip(specs, self.inputs[index], strict=True)
        )
        return [t.double() if t.is_floating_point() else t for t in picked]

    def _summed(self, computation: Computation, index: int) -> list[torch.Tensor]:
        """The outputs added up over pieces of the rows; those with rows are meaningless."""
        specs = self.workload.inputs(self.shape)
        total = next(spec.dims[0] for spec in specs if spec.rows)
        row = max(prod(spec.dims[1:]) for spec in specs if spec.rows)
        step = max(1, PIECE_ELEMENTS // row)
        sums: list[torch.Tensor] = []
        for begin in range(0, total, step):
            part = computation.reference(*self._exact(index, slice(begin, begin + step)))
            outputs = self.workload.outputs(self.shape)
            kept = [p if spec.summed else p[:0] for spec, p in zip(outputs, part, strict=True)]
            sums = [a + b for a, b in zip(sums, kept, strict=True)] if sums else kept
        return sums


def make_problem(
    workload: Workload,
    shape: Shape,
    dtype_name: str,
    dtype: torch.dtype,
    *,
    device: torch.device,
    multiprocessors: int,
    plan: SetPlan,
    seed: int,
    reference_rows: int = 512,
) -> Problem:
    """Allocate and fill the tensors of all sets; the same seed gives the same numbers."""
    generator = torch.Generator(device=device).manual_seed(seed)
    specs = (*workload.inputs(shape), *workload.outputs(shape))
    many = len(workload.inputs(shape))
    slabs, inputs, outputs = [], [], []
    for _ in range(plan.count):
        slab = torch.empty(slab_bytes(specs, dtype), dtype=torch.uint8, device=device)
        tensors = _carve(slab, specs, dtype)
        for spec, tensor in zip(specs[:many], tensors, strict=False):
            if spec.fill is not None:
                tensor.copy_(spec.fill(generator, spec.dims))
            elif spec.values is None:
                tensor.normal_(spec.mean, spec.std, generator=generator)
            else:
                tensor.copy_(torch.tensor(spec.values, dtype=torch.int32).view(spec.dims))
        for tensor in tensors[many:]:
            tensor.fill_(float("nan"))
        slabs.append(slab)
        inputs.append(tensors[:many])
        outputs.append(tensors[many:])
    return Problem(
        workload=workload,
        shape=shape,
        dtype=dtype,
        dtype_name=dtype_name,
        multiprocessors=multiprocessors,
        plan=plan,
        slabs=slabs,
        inputs=inputs,
        outputs=outputs,
        checked=tuple(sorted({0, plan.count // 2, plan.count - 1})),
        _rows=_choose_rows(specs, reference_rows, seed, device),
    )


def slab_bytes(specs: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    """Bytes of a set: every tensor starts at a multiple of ALIGNMENT."""
    return sum(-(-spec.size(dtype) // ALIGNMENT) * ALIGNMENT for spec in specs)


def _carve(slab: torch.Tensor, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Outputs:
    """Tensors inside the slab's storage.
    Not views of it, which torch.compile treats differently."""
    tensors, offset = [], 0
    for spec in specs:
        strides = torch.empty(spec.dims, device="meta").stride()
        element = spec.element(dtype)
        tensor = torch.empty(0, dtype=element, device=slab.device)
        tensor.set_(slab.untyped_storage(), offset // element.itemsize, spec.dims, strides)
        tensors.append(tensor)
        offset += -(-spec.size(dtype) // ALIGNMENT) * ALIGNMENT
    return tuple(tensors)


def _choose_rows(
    specs: Sequence[TensorSpec], limit: int, seed: int, device: torch.device
) -> torch.Tensor | None:
    """Rows to check when there are more than ``limit``: first, last, and random ones between."""
    total = next((spec.dims[0] for spec in specs if spec.rows), 0)
    if total <= limit:
        return None
    chosen = random.Random(seed).sample(range(1, total - 1), limit - 2)
    return torch.tensor([0, *sorted(chosen), total - 1], device=device)
