"""Files of Mirage: spellings, messages, and that whatever is damaged is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cutesuper as cs
from cutesuper.errors import FormatError
from cutesuper.ir.block import MuGraph
from cutesuper.ir.check import check_mugraph
from tests import mirage_json as mj
from tests.mirage_json import Graph, one, read

# ------------------------------------------------------------------------------------ the file


def test_a_file_of_several_and_on_error() -> None:
    good, bad = mj.lora(), mj.gated_mlp()
    bad[-2]["bgraph"]["operators"][3]["op_type"] = "tb_tanh_op"
    with pytest.raises(FormatError, match=r"muGraph 1, operator 3 .*, block operator 3 .*on_error"):
        read([good, bad, good])
    first, error, last = read([good, bad, good], on_error="keep")
    assert isinstance(error, FormatError) and first == last == one(good)
    with pytest.raises(ValueError, match="use 'raise' or 'keep'"):
        read([good], on_error="skip")
    assert read([]) == []


def test_names_inputs_and_outputs() -> None:
    mu = one(mj.attention())
    assert mu.inputs == ("X", "W", "A") and mu.outputs == ("t2",)
    g = Graph()
    x = g.input(2, 4)
    y, z = g.op("exp", x), g.op("square", x)
    g.output(z)
    mu = one(g.output(y))
    assert mu.outputs == ("t1", "t0")


def test_without_output_operators_what_nobody_reads_is_an_output() -> None:
    data = mj.attention()
    assert one(data[:-1]) == one(data)


def test_the_first_release() -> None:
    """It called accumulators otherwise, and had other codes of element types."""
    data = mj.rms_linear()
    old = json.loads(json.dumps(data).replace("tb_forloop_accum", "tb_accum").replace("941", "921"))
    assert one(old) == one(data)
    bf16 = json.loads(json.dumps(data).replace("941", "940"))
    assert one(bf16).tensors["X"].dtype == cs.bfloat16
    assert one(bf16, dtype="fp16") == one(data)
    with pytest.raises(FormatError, match="give load_mirage its dtype"):
        read(json.loads(json.dumps(data).replace("941", "930")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON, or cut short"),
        (json.dumps(mj.lora()).encode()[:-30], "not JSON, or cut short"),
        (b"[" * 100_000, "not JSON, or cut short"),
        (b'{"callstack": []}', "an object, not a list of muGraphs"),
        (b"\xff\xfe", "not JSON, or cut short"),
        (b"[3]", "muGraph 0 is 3, not a list"),
        (b"[[3]]", "muGraph 0, operator 0 is 3, not an object"),
        (b"[[]]", "muGraph 0: it computes nothing"),
        (b"1" * 10_000, "not JSON, or cut short"),
    ],
)
def test_other_files(content: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(content)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read it"):
        cs.load_mirage(tmp_path / "none.json")
    with pytest.raises(FormatError, match="cannot read it"):
        cs.load_mirage(tmp_path)


# --------------------------------------------------------------------------- what is wrong in it

GONE = object()
BGRAPH = (2, "bgraph")
OPS = (*BGRAPH, "operators")
SAMPLE = json.dumps(mj.rms_linear())  # operators: load X, load W, rms, matmul, nored, div, store


def value_at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


#: what is set (or taken away) where, and what the message says
EDITS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no field": ((*OPS, 0, "forloop_dim"), GONE, r"operator 0 \(tb_input_op\): the field"),
    "no type": ((0, "op_type"), GONE, "operator 0: the field 'op_type' is missing"),
    "other level": ((0, "op_type"), "tb_input_op", r"are called kn_\.\.\._op"),
    "unknown": ((*OPS, 3, "op_type"), "tb_matmull_op", "did you mean tb_matmul_op"),
    "power": ((*OPS, 5, "op_type"), "tb_pow_op", "there is no power among the operators"),
    "rescaled": ((*OPS, 2, "op_type"), "tb_accum_nored_rescale_op", "the maximum that its factors"),
    "unknown guid": ((*OPS, 3, "input_tensors", 0, "guid"), 7, "no operator before it makes"),
    "old guid": ((*OPS, 3, "output_tensors", 0, "guid"), 1005, "another tensor has the guid 1005"),
    "float": ((*BGRAPH, "forloop_range"), 4.0, r"forloop_range is 4\.0; it must be an integer"),
    "bool": ((*BGRAPH, "forloop_range"), True, "forloop_range is True"),
    "huge": ((*BGRAPH, "forloop_range"), 10**50, "forloop_range is a huge number"),
    "zero": ((*BGRAPH, "grid_dim", "x"), 0, "grid_dim: x is 0"),
    "text": ((0, "output_tensors", 0, "dim"), "2x16", "dim is '2x16', not a list"),
    "rank": ((0, "output_tensors", 0, "num_dims"), 5, "num_dims is 5"),
    "short": ((0, "output_tensors", 0, "dim"), [2], "dim has 1 entries, num_dims is 2"),
    "operands": ((*OPS, 3, "input_tensors", 1), GONE, r"1 operand\(s\) and 1 result"),
    "grid": ((*BGRAPH, "grid_dim", "x"), 5, r"divide \[16, 12\] into \[4, 5\] parts"),
    "map": ((*OPS, 1, "input_map", "x"), 3, "input_map maps x to dimension 3 of"),
    "shapes": ((0, "output_tensors", 0, "dim"), [2, 17, 0, 0], "was made as float16"),
    "result": ((*OPS, 3, "output_tensors", 0, "dim"), [2, 5, 0, 0], r"its operands give \[2, 4\]"),
    "operator": ((*OPS, 3, "op_type"), "tb_add_op", "do not fit together"),
    "order": ((2, "input_tensors"), [], "it reads other tensors"),
    "nothing": ((2,), GONE, "operator 2 .kn_output_op., operand 0: no operator before it"),
}


@pytest.mark.parametrize("name", EDITS)
def test_messages(name: str) -> None:
    data = json.loads(SAMPLE)
    path, value, message = EDITS[name]
    where = value_at(data, path[:-1])
    if value is GONE:
        del where[path[-1]]
    else:
        where[path[-1]] = value
    with pytest.raises(FormatError, match=message):
        read(data)


def test_outputs() -> None:
    data = json.loads(SAMPLE)
    with pytest.raises(FormatError, match="one tensor is an output twice"):
        read([*data, data[-1]])
    data[-1]["input_tensors"] = data[0]["output_tensors"]
    with pytest.raises(FormatError, match="an output is an input as it is"):
        read(data)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("twice", "its operand is accumulated already"),
        ("never", "it would store in every iteration"),
        ("half", "one operand is accumulated over the loop, the other is not"),
    ],
)
def test_accumulators_stand_between_loop_and_result(how: str, message: str) -> None:
    g = Graph()
    b = g.block(loop=2)
    x = b.load(g.input(4, 4), loop=0)
    total = x if how == "never" else b.acc(x)
    b.store({"twice": b.acc, "never": lambda t: t, "half": lambda t: b.op("add", x, t)}[how](total))
    with pytest.raises(FormatError, match=message):
        read(g.output(b.done()[0]))


def test_blocks_must_not_overwrite_each_other() -> None:
    g = Graph()
    b = g.block(2)
    b.store(b.acc(b.load(g.input(4, 4), 0)))
    with pytest.raises(FormatError, match="blocks along x store different values in one place"):
        read(g.output(b.done()[0]))


def test_programs_that_no_block_program_expresses() -> None:
    g = Graph()
    b = g.block(2)
    x = b.load(g.input(4, 4))
    b.store(b.acc(x), 1)
    with pytest.raises(FormatError, match="store the same values side by side"):
        read(g.output(b.done()[0]))
    g = Graph()
    b = g.block(2)
    x = b.load(g.input(8, 4), 0)
    b.store(b.acc(b.op("matmul", x, x)), 0)
    with pytest.raises(FormatError, match="two dimensions of one tile are the same index"):
        read(g.output(b.done()[0]))
    g = Graph()
    b = g.block(2, 2)
    b.store(b.acc(b.load(g.input(8, 4), 0, 0)), 0, 0)
    with pytest.raises(FormatError, match="divides one dimension over two grid axes"):
        read(g.output(b.done()[0]))
    g = Graph()
    b = g.block(1)
    x = b.load(g.input(8, 4))
    b.store(b.acc(b.op("concat_0", x, x)))
    with pytest.raises(FormatError, match="a concatenation can only be multiplied"):
        read(g.output(b.done()[0]))
    g = Graph()
    data = g.output(g.op("mul_scalar", g.input(2, 2)))
    with pytest.raises(FormatError, match="Mirage does not write scalar into its files"):
        read(data)


WORDS = ("tb_exp_op", "tb_accum_nored_op", "kn_exp_op", "tb_input_op", "tb_matmul_op", "x", "", "é")
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.integers(),
    st.floats(),
    st.sampled_from(WORDS),
    st.just([]),
    st.just({}),
    st.just([[]]),
    st.just(mj.axes(1, 1, 1)),
)
SAMPLES = (
    mj.rms_linear(),
    mj.attention("redtox_ld_sum", 2),
    mj.outer_product_attention(),
    mj.norm_transformer(split=True),
    mj.lora("concat"),
)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of the JSON with every key of it."""
    if isinstance(data, dict | list):
        for key in list(data) if isinstance(data, dict) else range(len(data)):
            yield data, key
            yield from places(data[key])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutations_are_read_or_refused(data: st.DataObject) -> None:
    graph = json.loads(json.dumps(data.draw(st.sampled_from(SAMPLES))))
    for _ in range(data.draw(st.integers(1, 3))):
        everywhere = list(places(graph))
        where, key = everywhere[data.draw(st.integers(0, len(everywhere) - 1))]
        action = data.draw(st.sampled_from(("set", "delete", "copy")))
        if action == "set":
            where[key] = data.draw(VALUES)
        elif action == "delete":
            del where[key]
        else:
            other, its = everywhere[data.draw(st.integers(0, len(everywhere) - 1))]
            where[key] = copy.deepcopy(other[its])
    for found in read([graph], on_error="keep"):
        if isinstance(found, MuGraph):
            check_mugraph(found)
        else:
            assert isinstance(found, FormatError) and "muGraph 0" in str(found)
