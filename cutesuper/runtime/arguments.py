"""Description of a compiled kernel's arguments as JSON; checking and packing of real ones.

An argument is a tensor, a scalar or a pointer. Extents that are only known at call time are symbols
(``"d0"``), shared by all tensors that must agree on them::

    {"symbols": {"d0": 8},                       # d0 is a multiple of 8
     "arguments": [{"kind": "tensor", "dtype": "bfloat16", "shape": ["d0", 4096],
                    "stride": [4096, 1], "align": 16,
                    "layout": {"size": 16, "fields": [[0, "ptr"], [8, "i32"]]}}, ...]}
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cutesuper.errors import CompileError, DTypeError, FormatError, LayoutError, ShapeError
from cutesuper.runtime.host_module import ArgumentLayout

DTYPES = {
    "BFloat16": "bfloat16",
    "Boolean": "bool",
    "Float16": "float16",
    "Float32": "float32",
    "Float64": "float64",
    "Float8E4M3FN": "float8_e4m3fn",
    "Float8E5M2": "float8_e5m2",
    "Int8": "int8",
    "Int16": "int16",
    "Int32": "int32",
    "Int64": "int64",
    "TFloat32": "float32",
    "Uint8": "uint8",
    "Uint16": "uint16",
    "Uint32": "uint32",
    "Uint64": "uint64",
}
_SCALAR_FORMATS = {
    "i1": "<?", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q",
    "f16": "<e", "f32": "<f", "f64": "<d", "ptr": "<Q",
}  # fmt: skip


@dataclass(frozen=True)
class RawTensor:
    """A tensor in device memory as numbers, for callers without PyTorch.

    Attributes:
        pointer: device address.
        shape, stride: in elements, outermost first.
        dtype: a PyTorch name without the prefix, e.g. ``"bfloat16"``.
    """

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


# --- describing, when a kernel is compiled -------------------------------------------------------


def describe_arguments(
    arguments: Sequence[Any], layouts: Sequence[ArgumentLayout] | None = None
) -> dict[str, Any]:
    """Describe the fake arguments a kernel is compiled with; lists are flattened.

    Args:
        arguments: fake tensors, CuTe scalars, pointers, or nested lists of these.
        layouts: of the plain entry point, the stream last; left out for TVM-FFI.

    Raises:
        CompileError: when the layouts do not fit the arguments (compile-time constants among
            them: they belong in the launcher object).
    """
    flat = list(_flatten(arguments))
    symbols = _Symbols()
    described = [_describe(argument, symbols) for argument in flat]
    if layouts is not None:
        if len(layouts) != len(flat) + 1:
            raise CompileError(
                f"the kernel takes {len(layouts)} arguments in memory, but {len(flat)} and the "
                "stream were given; put compile-time constants into the launcher object"
            )
        for record, layout in zip(described, layouts, strict=False):
            record["layout"] = {
                "size": layout.size,
                "fields": [[field.offset, field.type] for field in layout.fields],
            }
    return {"symbols": symbols.divisibility, "arguments": described}


class _Symbols:
    """Names of symbolic extents, assigned by identity, as the compiler does."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.divisibility: dict[str, int] = {}

    def extent(self, value: Any) -> int | str:
        if isinstance(value, int):
            return value
        name = self.names.setdefault(id(value), f"d{len(self.names)}")
        self.divisibility[name] = int(value.divisibility)
        return name


def _flatten(arguments: Sequence[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from _flatten(cast("Sequence[Any]", argument))
        else:
            yield argument


def _describe(argument: Any, symbols: _Symbols) -> dict[str, Any]:
    if hasattr(argument, "element_type") and hasattr(argument, "stride"):
        return {
            "kind": "tensor",
            "dtype": _dtype_name(argument.element_type),
            "shape": [symbols.extent(extent) for extent in argument.shape],
            "stride": [symbols.extent(extent) for extent in argument.stride],
            "align": int(getattr(argument, "_assumed_align", None) or 1),
        }
    if hasattr(argument, "memspace"):
        return {"kind": "pointer"}
    return {"kind": "scalar", "dtype": _dtype_name(type(argument))}


def _dtype_name(dtype: type) -> str:
    return DTYPES.get(dtype.__name__, dtype.__name__.lower())


# --- checking and packing, when an exported kernel is called -------------------------------------


def check_description(description: Any, what: str) -> list[dict[str, Any]]:
    """Validate a description from a file and return its arguments.

    Raises:
        FormatError: names the first thing that is wrong.
    """
    try:
        symbols, records = description["symbols"], description["arguments"]
        if not all(isinstance(n, str) and isinstance(d, int) and d > 0 for n, d in symbols.items()):
            raise ValueError("symbols must map names to positive integers")
        for record in records:
            _check_record(record, symbols)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{what}: bad argument description: {error!r}; export it again") from None
    return records


def _check_record(record: Mapping[str, Any], symbols: Mapping[str, int]) -> None:
    size, fields = record["layout"]["size"], record["layout"]["fields"]
    if not isinstance(size, int) or not 0 < size <= 4096:
        raise ValueError(f"layout size {size!r}")
    for offset, kind in fields:
        width = struct.calcsize(_SCALAR_FORMATS.get(kind, "<Q"))
        if not 0 <= offset <= size - width:
            raise ValueError(f"layout field {offset!r} outside {size} bytes")
    if record["kind"] != "tensor":
        if record["kind"] not in ("scalar", "pointer") or len(fields) != 1:
            raise ValueError(f"argument of kind {record['kind']!r}")
        return
    if len(record["shape"]) != len(record["stride"]) or record["align"] < 1:
        raise ValueError("a tensor needs one stride per extent and a positive alignment")
    if not isinstance(record["align"], int) or not isinstance(record["dtype"], str):
        raise ValueError(f"alignment {record['align']!r} of {record['dtype']!r}")
    dynamic = [e for e in (*record["shape"], *record["stride"]) if not isinstance(e, int)]
    if any(name not in symbols for name in dynamic) or len(fields) != 1 + len(dynamic):
        raise ValueError(f"symbols {dynamic} do not fit the layout {fields}")


def pack_argument(
    record: Mapping[str, Any], value: Any, symbols: Mapping[str, int], bound: dict[str, int],
    what: str,
) -> bytes:  # fmt: skip
    """The bytes of one argument, checked against its description.

    Args:
        record: its description.
        value: a :class:`RawTensor`, or a number for scalars and pointers.
        symbols: divisibility by symbol.
        bound: values of the symbols seen so far in this call; extended here.
        what: name of the argument in messages, e.g. ``"rms_norm argument 2"``.

    Raises:
        ShapeError, DTypeError, LayoutError: naming the extent, type or stride that does not fit.
    """
    fields = record["layout"]["fields"]
    buffer = bytearray(record["layout"]["size"])
    if record["kind"] == "tensor":
        if not isinstance(value, RawTensor):
            raise DTypeError(f"{what}: expected a tensor, got {type(value).__name__}")
        values = [value.pointer, *_dynamic_values(record, value, symbols, bound, what)]
    elif isinstance(value, RawTensor):
        if record["kind"] != "pointer":
            raise DTypeError(f"{what}: expected a {record['kind']}, got a tensor")
        values = [value.pointer]
    else:
        values = [value]
    for (offset, kind), number in zip(fields, values, strict=True):
        try:
            _pack_into(buffer, offset, kind, number)
        except struct.error as error:
            raise ShapeError(f"{what}: {number} does not fit the kernel's {kind}") from error
    return bytes(buffer)


def _pack_into(buffer: bytearray, offset: int, kind: str, number: Any) -> None:
    if kind == "bf16":
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        # Round to nearest even, as the hardware does.
        struct.pack_into("<H", buffer, offset, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    else:
        struct.pack_into(_SCALAR_FORMATS[kind], buffer, offset, number)


def _dynamic_values(
    record: Mapping[str, Any], tensor: RawTensor, symbols: Mapping[str, int],
    bound: dict[str, int], what: str,
) -> list[int]:  # fmt: skip
    """Check a tensor; return its dynamic extents and then its dynamic strides."""
    if tensor.dtype != record["dtype"]:
        raise DTypeError(f"{what}: dtype {tensor.dtype}, but it was compiled for {record['dtype']}")
    if len(tensor.shape) != len(record["shape"]):
        raise ShapeError(
            f"{what}: shape {list(tensor.shape)}, but it was compiled for {record['shape']}"
        )
    if tensor.pointer % record["align"]:
        raise LayoutError(
            f"{what}: address {tensor.pointer:#x} is not a multiple of {record['align']} bytes; "
            "pass a tensor that starts at its own allocation"
        )
    values: list[int] = []
    for axis, (expected, actual) in enumerate(zip(record["shape"], tensor.shape, strict=True)):
        problem = _match(expected, actual, symbols, bound)
        if problem:
            raise ShapeError(f"{what}: extent {actual} of dimension {axis}: {problem}")
        values += [] if isinstance(expected, int) else [actual]
    for axis, (expected, actual) in enumerate(zip(record["stride"], tensor.stride, strict=True)):
        if tensor.shape[axis] == 1:
            # This stride is never used, and PyTorch reports any value; a TMA descriptor still needs
            # a legal one.
            divisor = 1 if isinstance(expected, int) else symbols[expected]
            values += [] if isinstance(expected, int) else [-(-actual // divisor) * divisor]
            continue
        problem = _match(expected, actual, symbols, bound)
        if problem:
            raise LayoutError(
                f"{what}: stride {actual} of dimension {axis}: {problem}; call .contiguous()"
            )
        values += [] if isinstance(expected, int) else [actual]
    return values


def _match(
    expected: int | str, actual: int, symbols: Mapping[str, int], bound: dict[str, int]
) -> str:
    """Reason why ``actual`` does not fit, or ''."""
    if isinstance(expected, int):
        return "" if actual == expected else f"the kernel was compiled for {expected}"
    if actual % symbols[expected]:
        return f"the kernel needs a multiple of {symbols[expected]}"
    first = bound.setdefault(expected, actual)
    return "" if first == actual else f"another argument has {first} for the same dimension"
