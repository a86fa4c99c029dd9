"""Functions of C that run a whole program: the source in an exported library, and its header.

For a program called ``x``::

    int64_t x_workspace_bytes(const int64_t *sizes);
    int x_run(void *const *tensors, const int64_t *sizes, void *workspace, cudaStream_t stream);
    int x_load(void);
    const char *x_error_text(int status);

They stand on the functions of `cutesuper.runtime.export`. What is known when the library is made
(which tensor is an argument of which kernel, where its extents go) becomes code, so a call reads no
tables and allocates nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from cutesuper.errors import FormatError
from cutesuper.ir.dtypes import ALL, INTEGERS
from cutesuper.runtime.checks import ALIGNMENT, MAX_ELEMENTS

#: a number; a symbol by name, or a product, ``"8*M"``; or ``[extent, tile]``: a number of tiles
Extent = int | str | list[Any]


@dataclass(frozen=True)
class Interface:
    """Source to compile into a library, and the header for its users.

    Attributes:
        name: what the names of its functions begin with.
        source: text in C, the header included.
        header: text in C and C++.
    """

    name: str
    source: str
    header: str


@dataclass(frozen=True)
class Step:
    """One launch.

    Attributes:
        kernel: by index.
        places: of its arguments.
        shapes: in which it sees them; the program's tensors may have others of the same size.
        starts: by argument, the element of its tensor that it begins at, where that is not the
            first one.
    """

    kernel: int
    places: Sequence[int]
    shapes: Sequence[Sequence[Extent]]
    starts: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True)
class Wiring:
    """A program as tensors and launches.

    Attributes:
        inputs, outputs, between: tensors ``{"name", "shape", "dtype"}``; their places count through
            all three lists.
        scratch: memory of single launches, in the places after these, with ``"zeroed"``.
        steps: the launches in order.
        homes: for tensors between kernels that lie in the memory of an earlier one, that one.
        continued: for outputs that rows are put into, by place, the input that they begin as.
        bounds: of a symbol, the least and the most that it was declared to be; None is no limit.
    """

    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]
    between: Sequence[Mapping[str, Any]]
    scratch: Sequence[Mapping[str, Any]]
    steps: Sequence[Step]
    homes: Mapping[int, int]
    continued: Mapping[int, int]
    bounds: Mapping[str, tuple[int, int | None]] = field(
        default_factory=dict[str, tuple[int, int | None]]
    )

    @property
    def given(self) -> list[Mapping[str, Any]]:
        """The tensors of the caller."""
        return [*self.inputs, *self.outputs]

    @property
    def tensors(self) -> list[Mapping[str, Any]]:
        """All tensors, by place."""
        return [*self.given, *self.between, *self.scratch]

    @property
    def symbols(self) -> list[str]:
        """The extents that a call gives, in the order in which the inputs have them."""
        opened = (e for t in self.inputs for e in t["shape"] if isinstance(e, str))
        return list(dict.fromkeys(f for e in opened for f in e.split("*") if not f.isdecimal()))


def name_of(header: Path) -> str:
    """The name of a program, from that of its header.

    Raises:
        FormatError: it does not end in ``.h``, or C could not have it as a name.
    """
    if header.suffix in (".h", ".hpp") and re.fullmatch(r"[A-Za-z]\w*", header.stem, re.ASCII):
        return header.stem
    raise FormatError(
        f"export: header={str(header)!r}: functions are called after it, so it must be a name in C "
        "and end in .h, as in model.h"
    )


def c_interface(name: str, wiring: Wiring, kernels: Sequence[Mapping[str, Any]]) -> Interface:
    """The functions of C for a program.

    Args:
        name: what their names begin with.
        wiring: the program.
        kernels: their arguments as described in `cutesuper.runtime.arguments`, and ``"outputs"``,
            the indices of those that a kernel writes.
    """
    writer = _Writer(name, wiring, kernels)
    header = writer.header()
    return Interface(name, header + writer.source(), header)


class _Writer:
    """Writer of the text; an extent that a call gives is ``s[i]``, a tensor ``t[place]``."""

    def __init__(self, name: str, wiring: Wiring, kernels: Sequence[Mapping[str, Any]]) -> None:
        self.name = name
        self.wiring = wiring
        self.kernels = kernels
        self.symbols = wiring.symbols
        self.tensors = wiring.tensors
        self.given = len(wiring.given)

    # ------------------------------------------------------------------------------------ extents

    def bounds(self, symbol: str) -> tuple[int, int | None]:
        """The least and the most of an extent."""
        return self.wiring.bounds.get(symbol, (0, None))

    def extent(self, e: Extent) -> str:
        """An extent as an expression."""
        if isinstance(e, int):
            return str(e)
        whole, tile = e if isinstance(e, list) else (e, 1)
        value = ""
        for f in whole.split("*"):
            factor = f if f.isdecimal() else f"s[{self.symbols.index(f)}]"
            value = f"times({value}, {factor})" if value else factor
        return value if tile == 1 else f"(({value} + {tile - 1}) / {tile})"

    def product(self, shape: Sequence[Extent]) -> str:
        """A number of elements as an expression, saturated."""
        text = str(prod(e for e in shape if isinstance(e, int)))
        for e in shape:
            if not isinstance(e, int):
                text = f"times({text}, {self.extent(e)})"
        return text

    def elements(self, place: int) -> str:
        """The number of elements of a tensor as an expression."""
        return self.product(self.tensors[place]["shape"])

    def bytes(self, place: int) -> str:
        """The bytes of a tensor as an expression."""
        return f"{self.elements(place)} * {self._itemsize(place)}"

    def _itemsize(self, place: int) -> int:
        return (ALL | INTEGERS)[self.tensors[place]["dtype"]].itemsize

    # ------------------------------------------------------------------------------------- source

    def source(self) -> str:
        """The functions."""
        steps = "\n".join(self._step(n) for n in range(len(self.wiring.steps)))
        text = _SOURCE
        for key, value in {
            "STEPS": steps,
            "SIZES": self._lines(self._size_checks()),
            "TENSORS": self._lines(self._tensor_checks()),
            "PLACES": self._lines(self._places()),
            "BEFORE": self._lines(self._before()),
            "CALLS": self._lines(
                f"if (!status) status = step{n}(t, s, stream);"
                for n in range(len(self.wiring.steps))
            ),
            "TEXTS": self._lines(
                f"case {code}: return {_quoted(text)};" for code, text in self._texts()
            ),
            "COUNT": str(len(self.tensors)),
            "SYMBOLS": str(len(self.symbols)),
            "GIVEN": str(self.given),
            "NAME": self.name,
        }.items():
            text = text.replace(f"@{key}@", value)
        return text

    @staticmethod
    def _lines(lines: Iterator[str]) -> str:
        return "\n".join(f"    {line}" for line in lines)

    def _size_checks(self) -> Iterator[str]:
        for i, symbol in enumerate(self.symbols):
            least, most = self.bounds(symbol)
            upper = "INT32_MAX" if most is None else str(most)
            yield f"if (s[{i}] < {least} || s[{i}] > {upper}) return {_SIZE - i};"
        for place, tensor in enumerate(self.tensors):
            if any(not isinstance(e, int) for e in tensor["shape"]):
                yield f"if ({self.elements(place)} > {MAX_ELEMENTS}) return {_LARGE - place};"

    def _tensor_checks(self) -> Iterator[str]:
        for place in range(self.given):
            yield f"if (!t[{place}] && {self.elements(place)}) return {_MISSING - place};"
            yield f"if ((uintptr_t)t[{place}] % {ALIGNMENT}) return {_ALIGNMENT - place};"

    def _places(self) -> Iterator[str]:
        """C code for the places in the workspace; memory that has to be zero comes first."""
        own = range(self.given, len(self.tensors))
        zeroed = [p for p in own if self.tensors[p].get("zeroed")]
        for place in zeroed:
            yield f"at[{place}] = end; end += ALIGNED({self.bytes(place)});"
        yield "*zeros = end;"
        for place in own:
            if (home := self.wiring.homes.get(place)) is not None:
                yield f"at[{place}] = at[{home}];"
            elif place not in zeroed:
                yield f"at[{place}] = end; end += ALIGNED({self.bytes(place)});"

    def _before(self) -> Iterator[str]:
        for out, source in self.wiring.continued.items():
            yield f"if (!status && t[{out}] != t[{source}])"
            where = f"t[{out}], t[{source}], {self.bytes(out)}"
            yield f"    status = cudaMemcpyAsync({where}, 3, stream);"  # 3: device to device

    def _step(self, n: int) -> str:
        step = self.wiring.steps[n]
        kernel = self.kernels[step.kernel]
        arguments = kernel["arguments"]["arguments"]
        written = [self.elements(step.places[i]) for i in kernel["outputs"]]
        lines = [f"static int step{n}(char *const *t, const int64_t *s, void *stream)", "{"]
        for i, argument in enumerate(arguments):
            lines.append(f"    {_ARGUMENT} a{i}[{argument['layout']['size']}] = {{ 0 }};")
        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        lines.append(f"    void *all[] = {{ {names}, &stream }};")
        if written:
            lines.append(f"    if (!({' || '.join(written)})) return 0;")
        for i, argument in enumerate(arguments):
            start = step.starts.get(i, 0) * self._itemsize(step.places[i])
            lines += self._packed(i, (step.places[i], start), step.shapes[i], argument)
        lines += [f"    return cutesuper_launch({step.kernel}, all, {len(arguments) + 1});", "}"]
        return "\n".join(lines) + "\n"

    def _packed(
        self, i: int, at: tuple[int, int], seen: Sequence[Extent], argument: Mapping[str, Any]
    ) -> Iterator[str]:
        """The statements that write one argument: pointer, open extents, open strides.
        ``at`` is the place of its tensor, and the byte of it that it begins at."""
        place, begin = at
        if place >= self.given + len(self.wiring.between):
            shape = [self.product(seen)]  # scratch memory has one dimension
        else:
            shape = [self.extent(e) for e in seen or [1]]
        strides = [" * ".join(f"({e})" for e in shape[a + 1 :]) or "1" for a in range(len(shape))]
        numbers = zip((*shape, *strides), (*argument["shape"], *argument["stride"]), strict=True)
        opened = [e for e, known in numbers if isinstance(known, str)]
        (start, _), *fields = argument["layout"]["fields"]
        yield f"    put_pointer(a{i} + {start}, t[{place}]{f' + {begin}' if begin else ''});"
        for (offset, kind), value in zip(fields, opened, strict=True):
            yield f"    put_{kind}(a{i} + {offset}, {value});"

    # --------------------------------------------------------------------------------------- texts

    def _texts(self) -> Iterator[tuple[int, str]]:
        """The errors of a program that have a number."""
        for i, symbol in enumerate(self.symbols):
            least, most = self.bounds(symbol)
            below = f"less than {least}" if least else "negative"
            above = "has more than 31 bits" if most is None else f"more than {most}"
            yield _SIZE - i, f"sizes[{i}] ({symbol}) is {below} or {above}"
        for place, tensor in enumerate(self.tensors):
            what = f"tensors[{place}]" if place < self.given else "a tensor between kernels"
            what += f" ({tensor['name']})"
            if any(not isinstance(e, int) for e in tensor["shape"]):
                text = f"{what} would have more than {MAX_ELEMENTS} elements; split the batch"
                yield _LARGE - place, text
            if place < self.given:
                yield _MISSING - place, f"{what} is NULL"
                text = f"{what} does not begin at a multiple of {ALIGNMENT} bytes"
                yield _ALIGNMENT - place, text

    def _range(self, symbol: str) -> str:
        """The bounds of an extent in words, if there are any."""
        least, most = self.bounds(symbol)
        if most is None:
            return f", at least {least}" if least else ""
        return f", {least} to {most}" if least else f", at most {most}"

    def header(self) -> str:
        """The declarations."""
        sizes = [f"sizes[{i}]  {s}{self._range(s)}" for i, s in enumerate(self.symbols)]
        sizes = sizes or ["none; NULL will do"]
        tensors = [
            f"tensors[{place}]  {'input ' if place < len(self.wiring.inputs) else 'output'}  "
            f"{t['name']}  {t['dtype']} [{', '.join(map(str, t['shape']))}]"
            for place, t in enumerate(self.wiring.given)
        ]
        told = "\n".join(f" *   {_plain(line)}" for line in [*tensors, *sizes])
        values = {"TOLD": told, "GIVEN": str(self.given), "UPPER": self.name.upper(),
                  "COUNT": str(len(self.symbols)), "NAME": self.name}  # fmt: skip
        text = _HEADER
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        return text


def _plain(text: str) -> str:
    """Text for a comment."""
    return text.encode("ascii", "replace").decode().replace("*/", "* /")


def _quoted(text: str) -> str:
    """Text as a string of C, bytes that are not plain as octal numbers."""
    plain = set(range(32, 127)) - set(b'"\\?')
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'


#: the first number of each kind of error, the others count down from it
_SIZE, _MISSING, _ALIGNMENT, _LARGE = -1000, -2000, -3000, -4000
_ARGUMENT = "unsigned char __attribute__((aligned(16)))"

_HEADER = """\
/* A program of GPU kernels, written by cutesuper.
 *
 * Tensors are compact and row-major, in memory of the current device:
 *
@TOLD@
 *
 * All functions may be called from several threads, as long as no two runs that may overlap have
 * the same workspace or the same outputs.
 */
#ifndef CUTESUPER_@UPPER@_H
#define CUTESUPER_@UPPER@_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

enum { @NAME@_tensors = @GIVEN@, @NAME@_sizes = @COUNT@ };

/* Bytes of the workspace for a run with these sizes, 0 if it needs none; negative: a status. */
int64_t @NAME@_workspace_bytes(const int64_t *sizes);

/* Launch everything on a stream of the current device, and return without waiting for it.
 *
 * workspace: memory of the device from a multiple of 256 bytes on, whatever it holds; NULL if none
 * is needed. It is free again when the stream has done what is launched here.
 *
 * Returns 0; a negative number if an argument is wrong, and nothing was launched; or an error of
 * the CUDA runtime (cudaError_t). */
int @NAME@_run(void *const *tensors, const int64_t *sizes, void *workspace, cudaStream_t stream);

/* Load the code to the current device. The first run there does it, which takes milliseconds, and
 * is not possible while a CUDA graph is captured. Returns 0 or a cudaError_t. */
int @NAME@_load(void);

/* A status in words. */
const char *@NAME@_error_text(int status);

#ifdef __cplusplus
}
#endif
#endif
"""

_SOURCE = """
#include <string.h>

extern int cudaGetDevice(int *device);
extern int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream);
extern int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream);
extern int cutesuper_load(int device), cutesuper_launch(int kernel, void **arguments, int count);
extern const char *cutesuper_error_text(int status);

/* what cudaMalloc gives, and whole lines of L2 */
#define ALIGNED(n) (((n) + 255) & ~(int64_t)255)

static inline int64_t times(int64_t a, int64_t b)
{
    int64_t c;
    return __builtin_mul_overflow(a, b, &c) ? INT64_MAX : c;
}

static inline void put_pointer(void *to, void *value) { memcpy(to, &value, sizeof value); }
static inline void put_i64(void *to, int64_t value) { memcpy(to, &value, sizeof value); }
static inline void put_i32(void *to, int64_t value)
{
    int32_t narrow = (int32_t)value;
    memcpy(to, &narrow, sizeof narrow);
}

@STEPS@
static int check_sizes(const int64_t *s)
{
    (void)s;
@SIZES@
    return 0;
}

static int check_tensors(char *const *t, const int64_t *s)
{
    (void)t, (void)s;
@TENSORS@
    return 0;
}

/* Offsets in the workspace, and how much of its beginning has to be zero; returns its bytes. */
static int64_t places(const int64_t *s, int64_t *at, int64_t *zeros)
{
    int64_t end = 0;
    (void)s, (void)at;
@PLACES@
    return end;
}

int64_t @NAME@_workspace_bytes(const int64_t *sizes)
{
    int64_t at[@COUNT@], zeros;
    int status = !sizes && @SYMBOLS@ ? -2 : check_sizes(sizes);
    return status ? status : places(sizes, at, &zeros);
}

int @NAME@_load(void)
{
    static unsigned char loaded[256];
    int device, status = cudaGetDevice(&device);
    if (status || __atomic_load_n(&loaded[device & 255], __ATOMIC_ACQUIRE))
        return status;
    status = cutesuper_load(device);
    if (!status)
        __atomic_store_n(&loaded[device & 255], 1, __ATOMIC_RELEASE);
    return status;
}

int @NAME@_run(void *const *tensors, const int64_t *s, void *workspace, cudaStream_t stream)
{
    char *t[@COUNT@];
    int64_t at[@COUNT@], zeros, bytes;
    int status, i;
    if (!tensors)
        return -1;
    if (!s && @SYMBOLS@)
        return -2;
    memcpy(t, tensors, @GIVEN@ * sizeof *t);
    if ((status = check_sizes(s)) || (status = check_tensors(t, s)))
        return status;
    bytes = places(s, at, &zeros);
    if (bytes && !workspace)
        return -3;
    if ((uintptr_t)workspace % 256)
        return -4;
    for (i = @GIVEN@; i < @COUNT@; i++)
        t[i] = (char *)workspace + at[i];
    if ((status = @NAME@_load()))
        return status;
    if (zeros)
        status = cudaMemsetAsync(workspace, 0, zeros, stream);
@BEFORE@
@CALLS@
    return status;
}

const char *@NAME@_error_text(int status)
{
    switch (status) {
    case -1: return "tensors is NULL";
    case -2: return "sizes is NULL";
    case -3: return "workspace is NULL, and this program needs one";
    case -4: return "workspace does not begin at a multiple of 256 bytes";
@TEXTS@
    }
    return status < 0 ? "no status of this program" : cutesuper_error_text(status);
}
"""
