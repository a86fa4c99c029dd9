"""muGraphs of the Mirage project, read from the JSON in which they are published."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

from cutesuper.contrib.mirage.assemble import assemble
from cutesuper.contrib.mirage.block import block_kernel
from cutesuper.contrib.mirage.document import Operator, read_document
from cutesuper.contrib.mirage.fields import short
from cutesuper.contrib.mirage.indices import Cuts
from cutesuper.contrib.mirage.program import Translated, translate
from cutesuper.contrib.mirage.steps import library_kernel
from cutesuper.errors import FormatError, GraphError, OptionError
from cutesuper.ir.arguments import as_path
from cutesuper.ir.block import MuGraph
from cutesuper.ir.check import check_mugraph
from cutesuper.ir.dtypes import DType, as_dtype


@overload
def load_mirage(
    path: str | os.PathLike[str], *, dtype: Any = None, on_error: Literal["raise"] = "raise"
) -> list[MuGraph]: ...


@overload
def load_mirage(
    path: str | os.PathLike[str], *, dtype: Any = None, on_error: Literal["keep"]
) -> list[MuGraph | FormatError]: ...


def load_mirage(
    path: str | os.PathLike[str], *, dtype: Any = None, on_error: str = "raise"
) -> Sequence[MuGraph | FormatError]:
    """Read muGraphs that Mirage wrote: ``to_json`` of a graph, or the checkpoint of a search.

    The result is a program to be verified, not a trusted one: `cutesuper.verify` checks it against
    a kernel graph.

    Args:
        path: a JSON file with a list of muGraphs, or with one.
        dtype: element type of all tensors. None reads the codes of the published checkpoints;
            releases since March 2026 use 940 for float16 and 941 for bfloat16, the other way
            round, so their files need this.
        on_error: "raise" refuses the file at the first muGraph that cannot be read, "keep" puts
            the error in its place in the list.

    Returns:
        The muGraphs in the order of the file.

    Raises:
        FormatError: the file is not JSON, or holds something other than muGraphs; a muGraph cannot
            be read, with its number in the file, the operator and the reason.
    """
    if on_error not in ("raise", "keep"):
        raise OptionError(f"load_mirage(on_error={on_error!r}): use 'raise' or 'keep'")
    kind = None if dtype is None else as_dtype(dtype)
    what = as_path("load_mirage", path)
    graphs = _graphs(_parse(what), what)
    result: list[MuGraph | FormatError] = []
    for i, data in enumerate(graphs):
        try:
            result.append(_read(data, f"{what}, muGraph {i}", kind))
        except FormatError as error:
            if on_error == "raise":
                others = "; on_error='keep' reads the others" if len(graphs) > 1 else ""
                raise FormatError(f"{error}{others}") from None
            result.append(error)
    return result


def _parse(path: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise FormatError(f"{path}: cannot read it: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON, or cut short: {error}") from None


def _graphs(data: Any, what: str) -> list[Any]:
    """The muGraphs of a file: a list of lists of operators, or one list of operators."""
    if not isinstance(data, list):
        raise FormatError(f"{what}: it holds {short(data)}, not a list of muGraphs")
    return [data] if data and isinstance(data[0], dict) else data


def _read(data: Any, where: str, dtype: DType | None) -> MuGraph:
    """A muGraph from its JSON. Raises FormatError."""
    document = read_document(data, where, dtype)
    kernels: list[Translated] = []
    cuts: dict[int, tuple[tuple[int, ...], ...]] = {}
    for op in document.operators:
        kernels.append(_kernel(op, cuts))
        cuts |= kernels[-1].stored
    mu = assemble(document, kernels)
    try:
        check_mugraph(mu)
    except GraphError as error:
        raise FormatError(f"{where}: it does not make a legal muGraph: {error}") from error
    return mu


def _kernel(op: Operator, cuts: Cuts) -> Translated:
    kernel = library_kernel(op) if op.block is None else block_kernel(op, op.block)
    try:
        return translate(kernel, cuts)
    except FormatError:  # it may divide a tensor across the cuts of the kernel that wrote it
        return translate(kernel, {})
