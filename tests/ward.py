"""Kernels for Blackwell given to SentryWard, a verifier of PTX: protocol, races, values.

    verdict(given(plan))                     # every schedule of the barriers; races; lifetimes
    verdict(given(plan), reference="X @ W")  # and the output equal to a function of PyTorch

It reads a kernel's PTX, and a launch with its tensor maps, both as the host code of the kernel
makes them (the fake runtime of `tests.ptx.run` hands them over). What it says holds for these
extents, in real numbers; fences it does not know (the machine of `tests.ptx` does).

Source: https://github.com/gpu-verifier/sentryward, version 0.1.1.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cutesuper.ir.dims import extent
from cutesuper.runtime.compile import Artifact
from tests.plans import compiled
from tests.ptx.run import Launched, fake_device

#: bytes of a tensor map in the parameters of a kernel
MAP_BYTES = 128
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32", "int64": "s64"}
_SWIZZLES = ("none", "32B", "64B", "128B")


@dataclass(frozen=True)
class Given:
    """A kernel as it is launched.

    Attributes:
        plan: its plan.
        ptx: what the compiler wrote.
        launch: grid, block, cluster and parameters.
        tensors: the arguments.
    """

    plan: Any
    ptx: str
    launch: Launched
    tensors: tuple[torch.Tensor, ...]


def given(plan: Any, arch: str = "sm_100a") -> Given:
    """Compile a plan and let its host code launch it."""
    artifact: Artifact = compiled(plan, arch)
    tensors = tuple(torch.zeros(s, dtype=getattr(torch, d)) for s, d in arrays(plan))
    [launch] = fake_device().launches(artifact, tensors)
    return Given(plan, artifact.ptx, launch, tensors)


def digest(kernel: Given, reference: str = "") -> str:
    """A name for all that the verifier is given of a kernel: its text, its launch, a reference."""
    text = json.dumps([readable(kernel.ptx), described(kernel), reference], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def arrays(plan: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and types of the arguments, and of scratch memory."""
    return [
        *((tuple(a.shape), a.dtype) for a in plan.arguments),
        *((tuple(map(extent, s.shape)), s.dtype) for s in plan.scratch),
    ]


def verdict(
    kernel: Given, reference: str = "", planted: Callable[[str], str] = str, seconds: int = 300
) -> dict[str, Any]:
    """The verifier's verdict on a kernel.

    Args:
        kernel: as it is launched.
        reference: the output as an expression of PyTorch over the inputs by name, which are fp32
            by then; its value is rounded to the output's type. "" to check the protocol only.
        planted: a change of the PTX, to see it found.
        seconds: after which it gives up.
    """
    from sentryward import verify

    with tempfile.TemporaryDirectory(prefix="cutesuper-ward-") as name:
        folder = Path(name)
        ptx, launch = folder / "kernel.ptx", folder / "input.json"
        ptx.write_text(readable(planted(kernel.ptx)))
        launch.write_text(json.dumps(described(kernel)))
        more: dict[str, Any] = {}
        if reference:
            more["reference"] = folder / "example_reference.py"  # the name it asks for
            more["reference_binding"] = folder / "reference_binding.json"
            more["reference"].write_text(function(kernel.plan, reference))
            more["reference_binding"].write_text(json.dumps(binding(kernel.plan)))
        return verify(ptx, input=launch, timeout_seconds=seconds, **more)


def readable(ptx: str) -> str:
    """The PTX without what says nothing and the verifier does not know: the usual treatment of an
    operand that is read again, a mask of lanes that hides none; and 64-bit loads of values that two
    threads have written, as two loads. Descriptors with their highest bit are written unsigned."""
    ptx = ptx.replace(".collector::a::discard", "")
    ptx = re.sub(
        r"((?:or|add)\.[bs]64\s.*, )-(\d{18,});", lambda m: f"{m[1]}{2**64 - int(m[2])};", ptx
    )
    zeros = set(re.findall(r"mov\.b32\s+(%r\d+), 0;", ptx))
    lines: list[str] = []
    for n, line in enumerate(ptx.splitlines()):
        mask = re.search(r", \{(%r\d+(?:, %r\d+)*)\}", line)
        if mask and "tcgen05.mma" in line:
            assert set(mask[1].split(", ")) <= zeros, line
            line = line[: mask.start()] + line[mask.end() :]
        if load := re.match(r"\s*ld\.shared\.b64\s+(%rd\d+), \[(%r\d+)(?:\+(\d+))?\];", line):
            at = int(load[3] or 0)
            line = (
                f"{{ .reg .b32 low{n}, high{n}; ld.shared.b32 low{n}, [{load[2]}+{at}];\n"
                f"ld.shared.b32 high{n}, [{load[2]}+{at + 4}];\n"
                f"mov.b64 {load[1]}, {{low{n}, high{n}}}; }}"
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------- launches


def described(kernel: Given) -> dict[str, Any]:
    """The launch as the verifier takes it."""
    launch, declared, scalars, maps = kernel.launch, [], [], []
    for n, content in enumerate(kernel.launch.parameters):
        if len(content) == MAP_BYTES:
            found = tensor_map(kernel, content)
            maps.append({"parameter": n, **found})
            declared.append({"parameter": n, "type": "tensor_map", "object": found["object"]})
            continue
        first = 0
        # a pointer, and numbers that may stand behind it; or numbers only
        if len(content) >= 8 and (found := place(kernel, *struct.unpack_from("<Q", content))):
            name, first = found[0], 8
            assert found[1] == 0
            declared.append({"parameter": n, "type": "pointer", "space": "global", "object": name})
        scalars += [
            {"parameter": n, "type": "u32", "value": value, **({"offset": at} if at else {})}
            for at in range(first, len(content), 4)
            for value in struct.unpack_from("<I", content, at)
        ]
    return {
        "schema": "spverify.kernel-input/v1",
        "launch": {
            "grid_dim": launch.grid, "block_dim": launch.block, "cluster_dim": launch.cluster,
            "dynamic_shared_bytes": launch.shared,
        },
        "declarations": declared,
        "arguments": scalars,
        "tma_descriptors": maps,
    }  # fmt: skip


def place(kernel: Given, address: int) -> tuple[str, int] | None:
    """The argument that an address lies in, and the offset in bytes; None if it is in none."""
    names = [*(a.name for a in kernel.plan.arguments), *(f"scratch{n}" for n in range(9))]
    for name, tensor in zip(names, kernel.tensors, strict=False):
        if 0 <= address - tensor.data_ptr() < max(1, tensor.nbytes):
            return name, address - tensor.data_ptr()
    return None


def tensor_map(kernel: Given, content: bytes) -> dict[str, Any]:
    """A tensor map as the host code packs it: bits were read off, since they are not documented."""
    found = place(kernel, *struct.unpack_from("<Q", content))
    assert found, "a tensor map of no argument"
    name, offset = found
    rank = ((content[8] >> 4) & 7) + 1
    dtype = next(a.dtype for a in kernel.plan.arguments if a.name == name)
    outer = [16 * n for n in struct.unpack_from("<4I", content, 12)]
    return {
        "object": name,
        "element_type": _SHORT[dtype],
        "rank": rank,
        "base_byte_offset": offset,
        "global_shape": [n + 1 for n in struct.unpack_from("<5I", content, 32)][:rank],
        "box_shape": [n + 1 for n in content[55 : 55 + rank]],
        "coordinate_strides_bytes": [bytes_of(dtype), *outer[: rank - 1]],
        "element_strides": [1] * rank,
        "swizzle": _SWIZZLES[content[9] >> 5],
        "interleave": "none",
        "oob_fill": "zero",
    }


# ------------------------------------------------------------------------------------- reference


def bytes_of(dtype: str) -> int:
    return getattr(torch, dtype).itemsize  # type: ignore[no-any-return]


def function(plan: Any, expression: str) -> str:
    """The text of a function of PyTorch."""
    *inputs, output = plan.arguments
    names = ", ".join(a.name for a in inputs)
    wide = "".join(f"    {a.name} = {a.name}.float()\n" for a in inputs)
    result = f"    return ({expression}).to(torch.{output.dtype})\n"
    return f"import torch\n\n\ndef reference({names}):\n{wide}{result}"


def binding(plan: Any) -> dict[str, Any]:
    """The kernel's arguments that are those of the function, and their layouts."""
    names = {a.name: f"6:global{len(a.name)}:{a.name}" for a in plan.arguments}
    sides = {
        "allocations": {names[a.name]: a.name for a in plan.arguments},
        "parameters": {},
        "layouts": {names[a.name]: layout("source", "target", a) for a in plan.arguments},
    }
    *inputs, output = plan.arguments
    return {
        "schema": "spverify.equivalence-mapping.v1",
        "left_inputs": sides,
        "right_inputs": sides,
        "output_value_semantics": "ideal_real",
        "outputs": {
            "kind": "dense_tensor",
            "left_allocation": names[output.name],
            "right_allocation": names[output.name],
            **layout("left", "right", output),
        },
        "reference": {
            "arguments": [
                {"name": a.name, "allocation": names[a.name], "dtype": a.dtype, "shape": a.shape}
                for a in inputs
            ]
        },
    }


def layout(one: str, other: str, argument: Any) -> dict[str, Any]:
    """The layout of a contiguous tensor, for both sides of a correspondence."""
    size = bytes_of(argument.dtype)
    strides = [size * s for s in torch.empty(argument.shape, device="meta").stride()]
    return {
        f"{one}_offset": 0, f"{other}_offset": 0, "element_bytes": size,
        "shape": argument.shape,
        f"{one}_strides_bytes": strides, f"{other}_strides_bytes": strides,
    }  # fmt: skip
