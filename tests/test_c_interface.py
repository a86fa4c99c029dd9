"""Programs called from C: the launches that Python makes, checked arguments, an example in C++."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutesuper.errors import FormatError
from cutesuper.ir.graph import symbol
from cutesuper.runtime import toolchain
from cutesuper.runtime.c_interface import Wiring, c_interface, name_of
from cutesuper.runtime.cache import KernelCache
from cutesuper.runtime.program import export_program, load
from tests.fake_runtime import Launch, build_fake_runtime, record_launches

pytest.importorskip("cutlass")
if shutil.which("gcc") is None:
    pytest.skip("exporting and recording launches need gcc", allow_module_level=True)

N, K = 128, 512
X, W, Z, MEMORY = 0x7F0000001000, 0x7F0000002000, 0x7F0000003000, 0x7F0000004000
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "cpp"


@contextlib.contextmanager
def fake_runtime() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(toolchain.CUDART_VARIABLE, str(build_fake_runtime().cudart_static))
        yield


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norm and product in two kernels, any number of rows, with its header."""
    from tests.test_program import compiled, two_kernels

    folder = tmp_path_factory.mktemp("c")
    g, mu = two_kernels(symbol("M", 32))
    with fake_runtime():
        variant = compiled(mu, KernelCache(folder / "cache"))
        export_program(g, variant, folder / "norm.so", folder / "norm.h")
    return folder / "norm.so"


def recorded(script: str) -> list[Launch]:
    prelude = """
    import sys
    for name in ("cutlass", "tvm_ffi", "cuda", "numpy"):
        sys.modules[name] = None
    from ctypes import CDLL, c_char_p, c_int64, c_void_p
    def opened(path):
        library = CDLL(path)
        library.norm_workspace_bytes.restype = c_int64
        library.norm_error_text.restype = c_char_p
        return library
    def run(library, tensors, rows, workspace, stream=0x77):
        sizes = (c_int64 * 1)(rows) if rows is not None else None
        array = (c_void_p * len(tensors))(*tensors) if tensors else None
        return library.norm_run(array, sizes, c_void_p(workspace), c_void_p(stream))
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(script)
    return record_launches(script, parameter_bytes=(16, 16))


@pytest.mark.parametrize("rows", [1, 33])
def test_launches_are_those_of_python(library: Path, rows: int) -> None:
    ours = recorded(f"""
    library = opened({str(library)!r})
    assert library.norm_workspace_bytes((c_int64 * 1)({rows})) == {-(-rows * K * 2 // 256) * 256}
    status = run(library, [{X}, {W}, {Z}], {rows}, {MEMORY})
    assert status == 0, library.norm_error_text(status)
    """)
    theirs = recorded(f"""
    from cutesuper.runtime.arguments import RawTensor
    from cutesuper.runtime.program import load
    def raw(pointer, *shape):
        return RawTensor(pointer, shape, (shape[1], 1), "float16")
    values = [raw({X}, {rows}, {K}), raw({W}, {K}, {N}), raw({Z}, {rows}, {N})]
    values.append(raw({MEMORY}, {rows}, {K}))
    load({str(library)!r}).launch(values, stream=0x77, device=0)
    """)
    # behind pointer and rows come bytes that nobody sets
    ours, theirs = ([replace(n, parameters=tuple(p[:12] for p in n.parameters)) for n in launches]
                    for launches in (ours, theirs))  # fmt: skip
    assert len(ours) == 2 and ours == theirs


def test_arguments_are_checked(library: Path) -> None:
    launches = recorded(f"""
    library = opened({str(library)!r})
    good = [{X}, {W}, {Z}]
    def said(*arguments):
        status = run(library, *arguments)
        assert status < 0
        return library.norm_error_text(status).decode()
    assert said(None, 4, {MEMORY}) == "tensors is NULL"
    assert said(good, None, {MEMORY}) == "sizes is NULL"
    assert said(good, 4, None) == "workspace is NULL, and this program needs one"
    assert said(good, 4, {MEMORY + 16}) == "workspace does not begin at a multiple of 256 bytes"
    assert said([{X}, None, {Z}], 4, {MEMORY}) == "tensors[1] (W) is NULL"
    assert said([{X}, {W}, {Z + 2}], 4, {MEMORY}).endswith("begin at a multiple of 16 bytes")
    for rows in (-1, 2**31, 2**62):
        assert said(good, rows, {MEMORY}) == "sizes[0] (M) is negative or has more than 31 bits"
    assert "(X) would have more than 2147483647 elements" in said(good, 2**22, {MEMORY})
    assert library.norm_workspace_bytes((c_int64 * 1)(2**22)) < 0
    assert library.norm_error_text(-77) == b"no status of this program"
    assert library.norm_error_text(0) == b"no error"
    assert run(library, [None, {W}, None], 0, None) == 0  # nothing to do, so nothing is launched
    """)
    assert launches == []


def test_errors_of_launches_come_back(library: Path) -> None:
    assert (
        recorded(f"""
    import os
    os.environ["FAKE_CUDA_FAIL"] = "700"
    library = opened({str(library)!r})
    assert run(library, [{X}, {W}, {Z}], 4, {MEMORY}) == 700
    assert library.norm_error_text(700) == b"fake failure"
    """)
        == []
    )


def test_a_library_with_functions_of_c_is_one_of_python_too(library: Path) -> None:
    assert load(library).explain() == "how it was found"
    header = library.with_suffix(".h").read_text()
    assert "tensors[1]  input   W  float16 [512, 128]" in header
    assert "sizes[0]  M" in header and "norm_tensors = 3, norm_sizes = 1" in header


def test_the_header_names_the_functions(tmp_path: Path) -> None:
    assert name_of(Path("a/b/Model_2.h")) == "Model_2"
    for name in ("model", "2.h", "mein modell.h", "größe.h", "x.c"):
        with pytest.raises(FormatError, match=r"must be a name in C and end in \.h"):
            name_of(Path(name))


def tensor(name: str, *shape: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": "float32", **more}


def test_the_workspace(tmp_path: Path) -> None:
    """Memory that has to be zero comes first and is set to zero, tensors may share a place, and
    rows that stay are copied."""
    wiring = Wiring(
        [tensor("X", "M", 8), tensor('"\\?*/é', 4)], [tensor("Y", "M", 8)],
        [tensor("T", "M", 8), tensor("U", "M", 8)],
        [tensor("part", ["M", 64], 100, zeroed=False), tensor("count", ["M", 64], zeroed=True)],
        [], {4: 3}, {2: 0},
    )  # fmt: skip
    interface = c_interface("x", wiring, [])
    (tmp_path / "run.c").write_text(interface.source + """
#include <stdio.h>
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream)
{ printf("copy %d %d\\n", (int)bytes, to != from); return 0; }
int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream)
{ printf("zero %d\\n", (int)bytes); return 0; }
int cutesuper_load(int device) { printf("load\\n"); return 0; }
const char *cutesuper_error_text(int status) { return "cuda"; }
int main(void)
{
    static char memory[1 << 20] __attribute__((aligned(256)));
    void *tensors[3] = { memory, memory, memory + 4096 };
    int64_t sizes[1] = { 130 };
    printf("%d\\n", (int)x_workspace_bytes(sizes));
    printf("%d\\n", x_run(tensors, sizes, memory, 0));
    tensors[2] = memory;
    printf("%d\\n", x_run(tensors, sizes, memory, 0));
    printf("%s\\n", x_error_text(-2001));
    return 0;
}
""")  # fmt: skip
    command = ["gcc", "-Wall", "-Werror", "-Wno-unused-function", "run.c", "-o", "run"]
    subprocess.run(command, cwd=tmp_path, check=True)
    out = subprocess.run([tmp_path / "run"], check=True, capture_output=True).stdout.decode()
    size = 256 + 130 * 8 * 4 // 256 * 256 + 256 + -(-3 * 100 * 4 // 256) * 256
    assert out.splitlines() == [
        str(size), "load", "zero 256", f"copy {130 * 8 * 4} 1", "0", "zero 256", "0",
        'tensors[1] ("\\?*/é) is NULL',
    ]  # fmt: skip
