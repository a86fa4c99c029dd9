"""Programs of several element types through the search: who may be in one kernel."""

from __future__ import annotations

from cutesuper.ir.block import MuGraph
from cutesuper.ir.graph import KernelGraph, Tensor, new_kernel_graph
from cutesuper.search.search import SearchOptions, search
from cutesuper.targets import H200
from cutesuper.verify.equivalence import verify


def searched(graph: KernelGraph) -> MuGraph:
    """The best program; it is right, and its tensors have the types of the graph."""
    mu = search(graph, H200, options=SearchOptions(lowered=True)).candidates[0].mugraph
    assert verify(graph, mu)
    for name, i in zip(mu.outputs, graph.outputs, strict=True):
        assert mu.tensors[name].dtype == graph.nodes[i].dtype
    return mu


def linear(g: KernelGraph, dtype: str) -> Tensor:
    return g.new_input((16, 256), dtype) @ g.new_input((256, 512), dtype)


def test_a_bias_and_a_result_of_another_type() -> None:
    g = new_kernel_graph()
    g.mark_output(g.relu(linear(g, "bf16") + g.new_input((512,), "fp32")), "fp16")
    assert len(searched(g).steps) == 1


def test_products_of_two_types_are_two_kernels() -> None:
    g = new_kernel_graph()
    g.mark_output(linear(g, "bf16") + linear(g, "fp16"), "bf16")
    assert len(searched(g).steps) == 2


def test_a_statistic_of_another_type_beside_a_product_is_another_kernel() -> None:
    g = new_kernel_graph()
    z = g.new_input((16, 256), "fp16")
    g.mark_output(linear(g, "bf16") * g.sum(z, 1), "bf16")
    assert len(searched(g).steps) == 2


def test_rows_of_all_types_are_one_kernel() -> None:
    g = new_kernel_graph()
    x, r, w = g.new_input((8, 64), "bf16"), g.new_input((8, 64), "fp16"), g.new_input((64,), "fp32")
    h = g.mark_output(x + r, "bf16")
    g.mark_output(g.rms_norm(h, w), "fp16")
    assert len(searched(g).steps) == 1


def test_a_product_of_float32_beside_another() -> None:
    g = new_kernel_graph()
    g.mark_output(linear(g, "fp32") + linear(g, "bf16"))
    assert len(searched(g).steps) == 2


def test_an_operator_stored_in_float32_is_not_rounded_on_the_way() -> None:
    """A kernel may end inside of it; operands of products keep the type that tensor cores take."""
    g = new_kernel_graph()
    q, k, v = (g.new_input((64, 64), "float16", name) for name in "qkv")
    g.mark_output(g.layer_norm(q), "float32")
    g.mark_output(g.scaled_dot_product_attention(q, k, v), "float32")
    nodes = g.expanded().nodes
    factors = {j for n in nodes if n.operator == "matmul" for j in n.inputs}
    for i, n in enumerate(nodes):
        short = n.operator == "input" or i in factors
        assert n.dtype.name == ("float16" if short else "float32"), n


def test_a_result_in_float32_that_a_product_reads_too() -> None:
    g = new_kernel_graph()
    p = g.softmax(g.new_input((16, 256), "fp16"))
    g.mark_output(p, "fp32")
    g.mark_output(p @ g.new_input((256, 512), "fp16"))
    assert searched(g).tensors["out1"].dtype.name == "float16"
