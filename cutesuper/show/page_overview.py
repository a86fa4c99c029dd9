"""Two drawings side by side: the definition, and the kernels that compute it."""

from __future__ import annotations

from collections.abc import Sequence

from cutesuper.ir.block import MuGraph
from cutesuper.ir.dims import show_shape, size
from cutesuper.ir.graph import KernelGraph, Node
from cutesuper.ir.operators.base import CONSTANT, INPUT
from cutesuper.ir.outline import show_bytes
from cutesuper.show.page_drawing import Box, dag
from cutesuper.show.page_parts import Html, shorten


def definition(graph: KernelGraph, kernels: dict[int, tuple[int, ...]]) -> Html:
    """The kernel graph; operators carry the names of the kernels that compute them.

    Args:
        graph: the definition.
        kernels: as returned by `cutesuper.show.page_fusion.kernels_of`.
    """
    numbers = {i: n for i, n in enumerate(graph.nodes) if n.operator != CONSTANT}
    boxes = [_node_box(graph, i, n, kernels.get(i, ())) for i, n in numbers.items()]
    edges = {
        (f"d-{j}", f"d-{i}"): None for i, n in numbers.items() for j in n.inputs if j in numbers
    }
    return dag("the definition as a graph of tensor operators", boxes, list(edges))


def _node_box(graph: KernelGraph, index: int, node: Node, kernels: tuple[int, ...]) -> Box:
    shape = show_shape(node.shape)
    given = node.operator == INPUT
    operator = " ".join([node.operator, *_numbers(graph, node)])
    first = f"{shorten(node.name)} {shape}" if given else operator
    second = f"{node.dtype}{', constant' if node.constant else ''}" if given else shape
    look = f"tensor {'constant-input' if node.constant else 'input'}" if given else "operator"
    foot = "output" if index in graph.outputs else ""
    tags = [(f"k{k}", f"kc{k % 6}") for k in kernels]
    attributes = [f"{k}={v}" for k, v in node.attributes.items()]
    computed = [f"computed in {' and '.join(t for t, _ in tags)}"] if tags else []
    full = f"{node.name} {shape}" if given else operator
    label = ", ".join(filter(None, [full, second, *attributes, *computed, foot]))
    return Box(f"d-{index}", (first, second), look, label, tuple(tags), foot)


def _numbers(graph: KernelGraph, node: Node) -> list[str]:
    """Operands that are numbers."""
    inner = [graph.nodes[j] for j in node.inputs]
    return [f"{n.attributes['value']:g}" for n in inner if n.operator == CONSTANT]


def program(mu: MuGraph, titles: Sequence[str], details: Sequence[str]) -> Html:
    """Kernels and the tensors between them.

    Args:
        mu: the program.
        titles: of the kernels.
        details: a few figures of each kernel.
    """
    boxes: list[Box] = []
    edges: dict[tuple[str, str], None] = {}
    number = {name: i for i, name in enumerate(mu.tensors)}
    inside = [(t.part.of, t.name) for t in mu.tensors.values() if t.part is not None]
    read = [(of, name) for of, name in inside if of in mu.inputs]
    boxes += [_tensor_box(mu, n, number[n]) for n in (*mu.inputs, *(name for _, name in read))]
    edges |= {(f"p-t{number[of]}", f"p-t{number[name]}"): None for of, name in read}
    for k, step in enumerate(mu.steps):
        reads = [f"p-t{number[n]}" for n in step.reads]
        writes = [f"p-t{number[n]}" for n in step.writes]
        label = f"kernel {step.name}: {titles[k]}, {details[k]}"
        lines = (shorten(titles[k], 40), details[k])
        tags = ((shorten(step.name), f"kc{k % 6}"),)
        boxes.append(Box(f"p-k{k}", lines, f"kernel kc{k % 6}", label, tags, href=f"#kernel-{k}"))
        boxes += [_tensor_box(mu, n, number[n]) for n in step.writes]
        edges |= {(t, f"p-k{k}"): None for t in reads} | {(f"p-k{k}", t): None for t in writes}
    made = [(name, of) for of, name in inside if of in mu.outputs]
    boxes += [_tensor_box(mu, n, number[n]) for n in dict.fromkeys(of for _, of in made)]
    edges |= {(f"p-t{number[name]}", f"p-t{number[of]}"): None for name, of in made}
    return dag("kernels in the order of their launches", boxes, list(edges))


def _tensor_box(mu: MuGraph, name: str, number: int) -> Box:
    t = mu.tensors[name]
    role = "input" if name in mu.inputs else "output" if name in mu.outputs else "between-kernels"
    role = "part" if t.part else role
    look = "constant-input" if t.constant else role
    stored = show_bytes(size(t.shape) * t.dtype.itemsize)
    shape = show_shape(t.shape)
    lines = (f"{shorten(name)} {shape}", f"{t.dtype}  {stored}")
    label = f"tensor {name} {shape}, {stored}, {role.replace('-', ' ')}"
    return Box(f"p-t{number}", lines, f"tensor {look}", label, tensor=number)
