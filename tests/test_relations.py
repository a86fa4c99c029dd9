"""Walks over what needs each other, and classes of equal things."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutesuper.ir.relations import Classes, ordered, reachable

#: operands of every node, all of them before it
Dag = list[list[int]]


@st.composite
def dags(draw: st.DrawFn) -> Dag:
    count = draw(st.integers(1, 12))
    return [draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else [] for i in range(count)]


@given(dags())
def test_walks_find_all_that_is_needed(dag: Dag) -> None:
    end = len(dag) - 1
    needed = {end}
    for i in reversed(range(len(dag))):
        needed |= set(dag[i]) if i in needed else set()
    assert set(reachable([end], dag.__getitem__)) == needed
    order = ordered([end], dag.__getitem__)
    assert sorted(order) == sorted(needed) and order[-1] == end
    place = {x: n for n, x in enumerate(order)}
    assert all(place[j] < place[i] for i in order for j in dag[i])


def test_orders() -> None:
    needs = {"a": "bc", "b": "d", "c": "d", "d": ""}
    assert ordered("a", needs.__getitem__) == ["d", "b", "c", "a"]
    assert list(reachable("a", needs.__getitem__)) == ["a", "c", "d", "b"]
    long = ordered([9999], lambda i: [i - 1] if i else [])
    assert long == list(range(10_000))


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8))))
def test_classes_are_those_of_the_pairs(pairs: list[tuple[int, int]]) -> None:
    classes, same = Classes[int](), {i: {i} for i in range(9)}
    for x, y in pairs:
        before = classes.copy()
        classes.join(x, y)
        assert (before.find(x) == before.find(y)) == (y in same[x])
        both = same[x] | same[y]
        same |= dict.fromkeys(both, both)
    assert all((classes.find(x) == classes.find(y)) == (y in same[x]) for x in same for y in same)
