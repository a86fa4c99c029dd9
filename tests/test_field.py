"""The finite field: its laws as properties, its fast paths against Python integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cutesuper.ir.field import (
    HIDDEN,
    LARGEST,
    OMEGA,
    SMALLEST,
    DivisionByZero,
    FieldAlgebra,
    FieldValue,
    Primes,
    draw_primes,
    inverse,
    uniform,
)

P, Q = LARGEST.p, LARGEST.q
A = FieldAlgebra(seed=5)
pytestmark = pytest.mark.filterwarnings("error")
rows = settings(max_examples=40, deadline=None)


def value(p: Any, q: Any, dims: tuple[str, ...] = ("M",)) -> FieldValue:
    return FieldValue(dims, np.array(p, dtype=np.uint64), np.array(q, dtype=np.uint64))


def residues(n: int = 5) -> st.SearchStrategy[FieldValue]:
    edge_p = st.sampled_from([0, 1, P - 1]) | st.integers(0, P - 1)
    edge_q = st.sampled_from([0, 1, Q - 1]) | st.integers(0, Q - 1)
    both = st.lists(st.tuples(edge_p, edge_q), min_size=n, max_size=n)
    return both.map(lambda v: value([a for a, _ in v], [b for _, b in v]))


def same(x: FieldValue, y: FieldValue) -> bool:
    return x.key() == y.key()


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def test_the_largest_pair_is_the_largest_safe_pair_below_2_31() -> None:
    assert P == 2 * Q + 1 and P < 2**31 and is_prime(P) and is_prime(Q)
    larger = [q for q in range(Q + 1, 2**30) if all(q % d and (2 * q + 1) % d for d in (2, 3, 5))]
    assert not any(2 * q + 1 < 2**31 and is_prime(q) and is_prime(2 * q + 1) for q in larger)
    assert OMEGA != 1 and pow(OMEGA, Q, P) == 1


def test_pairs_are_drawn_from_many_and_again_by_their_seed() -> None:
    pairs = [draw_primes([seed]) for seed in range(200)]
    assert len(set(pairs)) == 200 and pairs[7] == draw_primes([7])
    assert all(is_prime(x.p) and is_prime(x.q) for x in pairs[:20])
    assert all(SMALLEST <= x <= LARGEST for x in pairs)
    assert is_prime(SMALLEST.p) and is_prime(SMALLEST.q)


@pytest.mark.parametrize("number", ["p", "q", "2p", "q + 1", "-p", "p / 2", "p - 1"])
def test_numbers_that_vanish_or_meet_have_other_primes_drawn(number: str) -> None:
    """-1, 0 and 1 are told apart from what is one of them in the first pair."""
    first = draw_primes([0])
    value = float(eval(number.replace("2p", "2 * p"), {"p": first.p, "q": first.q}))
    other = draw_primes([0], [value])
    assert not first.tells_apart([value])
    assert other != first and other.tells_apart([value])
    assert first.tells_apart([3.0]) and not first.tells_apart([3.0, 3.0 + first.p])


@pytest.mark.parametrize("number", [float(P), -float(P), float(Q), 3.0 * Q, P / 2])
def test_a_number_that_is_zero_only_here_is_refused(number: float) -> None:
    with pytest.raises(DivisionByZero, match="is zero in the field"):
        A.constant(number)


@pytest.mark.parametrize("seed", range(5))
def test_exponentials_in_a_drawn_field(seed: int) -> None:
    primes = draw_primes([seed])
    a, rng = FieldAlgebra(seed, primes=primes), np.random.default_rng(seed)
    x, y = (uniform(rng, ("M",), (9,), primes=primes) for _ in "xy")
    assert same(a.exp(a.add(x, y)), a.mul(a.exp(x), a.exp(y)))
    assert x.q is not None
    assert a.exp(x).p.tolist() == [pow(OMEGA, int(v), primes.p) for v in x.q]


@rows
@given(residues(), residues(), residues())
def test_field_axioms(x: FieldValue, y: FieldValue, z: FieldValue) -> None:
    assert same(A.add(x, y), A.add(y, x)) and same(A.mul(x, y), A.mul(y, x))
    assert same(A.add(A.add(x, y), z), A.add(x, A.add(y, z)))
    assert same(A.mul(A.mul(x, y), z), A.mul(x, A.mul(y, z)))
    assert same(A.mul(x, A.add(y, z)), A.add(A.mul(x, y), A.mul(x, z)))
    assert same(A.add(A.sub(x, y), y), x)
    assert same(A.mul(x, A.constant(1.0)), x) and same(A.add(x, A.constant(0.0)), x)


@rows
@given(residues(), residues())
def test_division_undoes_multiplication_or_is_refused(x: FieldValue, y: FieldValue) -> None:
    assert y.q is not None
    if y.p.all() and y.q.all():
        assert same(A.mul(A.div(x, y), y), x)
    else:
        with pytest.raises(DivisionByZero):
            A.div(x, y)


def test_inverse_of_many() -> None:
    x = np.arange(1, 1002, dtype=np.uint64)
    assert (x * inverse(x, P) % np.uint64(P) == 1).all()


@rows
@given(residues(), residues())
def test_exp_turns_sums_into_products(x: FieldValue, y: FieldValue) -> None:
    assert same(A.exp(A.add(x, y)), A.mul(A.exp(x), A.exp(y)))
    assert same(A.exp(A.sub(x, y)), A.div(A.exp(x), A.exp(y)))
    e = A.exp(x)
    assert e.q is None and x.q is not None
    assert e.p.tolist() == [pow(OMEGA, int(v), P) for v in x.q]


def test_exp_of_an_exp_is_opaque_and_reported() -> None:
    a = FieldAlgebra()
    e = a.exp(value([3], [4]))
    assert not a.nested_exp
    twice = a.exp(e)
    assert a.nested_exp and same(twice, a.exp(e))


@rows
@given(residues(), residues())
def test_exp_of_a_logarithm_turns_sums_into_products(x: FieldValue, y: FieldValue) -> None:
    """Whatever the logarithm is of: an opaque function of the residue that is left."""
    log = A.opaque("log", A.exp(x))
    assert log.q is not None and same(log, A.opaque("log", A.exp(x)))
    assert same(A.exp(A.add(log, y)), A.mul(A.exp(log), A.exp(y)))
    assert not A.nested_exp


floats = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30)


@rows
@given(st.integers(-(2**52), 2**52), st.integers(-(2**52), 2**52), st.integers(-40, 40))
def test_constants_are_exact(m: int, n: int, e: int) -> None:
    x, y = A.constant(m * 2.0**e), A.constant(n * 2.0**e)
    assert same(A.add(x, y), A.mul(A.constant(float(m + n)), A.constant(2.0**e)))
    assert same(A.mul(A.constant(0.5), A.constant(2.0)), A.constant(1.0))


@rows
@given(floats, floats)
def test_different_constants_differ(x: float, y: float) -> None:
    assume(Primes(Q).tells_apart([x, y]))
    assert same(A.constant(x), A.constant(y)) == (x == y)


def test_opaque_functions() -> None:
    x = uniform(np.random.default_rng(0), ("M",), (100,))
    assert same(A.opaque("silu", x), A.opaque("silu", x))
    assert not same(A.opaque("silu", x), A.opaque("relu", x))
    assert not same(A.opaque("silu", x), FieldAlgebra(6).opaque("silu", x))
    f = A.opaque("silu", x)
    assert f.q is not None and len(set(f.p.tolist())) == 100 and (f.p < P).all() and (f.q < Q).all()
    bare = A.opaque("silu", x.without_q())
    assert same(bare.without_q(), f.without_q())  # that mod p depends on nothing else
    assert bare.q is not None and (bare.q < Q).all() and len(set(bare.q.tolist())) == 100


def test_operands_meet_by_name() -> None:
    rng = np.random.default_rng(0)
    x, y = uniform(rng, ("M", "K"), (2, 3)), uniform(rng, ("K", "N"), (3, 4))
    z = A.mul(x, y)
    assert set(z.dims) == {"M", "K", "N"} and z.p.shape == (2, 3, 4)
    assert z.p[1, 2, 3] == int(x.p[1, 2]) * int(y.p[2, 3]) % P
    assert same(z, A.mul(y, x))


@rows
@given(st.tuples(*[st.integers(1, 9)] * 4), st.sampled_from([1, 3, 40, 200]), st.integers(0, 2**32))
def test_matmul_equals_python_integers(s: tuple[int, ...], k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, m, n, _ = s
    x, y = uniform(rng, ("B", "M", "K"), (b, m, k)), uniform(rng, ("K", "N", "B"), (k, n, b))
    for r in (x.p, y.p):
        r[rng.random(r.shape) < 0.3] = P - 1  # the largest products
    z = A.matmul(x, y, ("K",))
    assert z.q is not None and x.q is not None and y.q is not None
    exact = np.einsum("bmk,knb->bmn", x.p.astype(object), y.p.astype(object)) % P
    exact_q = np.einsum("bmk,knb->bmn", x.q.astype(object), y.q.astype(object)) % Q
    assert z.dims == ("B", "M", "N")
    assert (z.p == exact).all() and (z.q == exact_q).all()


@pytest.mark.parametrize("m", [16, 100])
def test_large_matmul_at_the_edge_of_exactness(m: int) -> None:
    x = FieldValue(("M", "K"), np.full((m, 5000), P - 1, dtype=np.uint64))
    y = FieldValue(("K", "N"), np.full((5000, 130), P - 1, dtype=np.uint64))
    assert (A.matmul(x, y, ("K",)).p == 5000).all()


def test_matmul_is_a_sum_of_products() -> None:
    rng = np.random.default_rng(0)
    x, y = uniform(rng, ("M", "K"), (70, 30)), uniform(rng, ("K", "N"), (30, 20))
    assert same(A.matmul(x, y, ("K",)), A.sum(A.mul(x, y), ("K",)))
    with pytest.raises(ValueError, match="over M"):
        A.matmul(x, y, ("M",))


def test_sum_over_a_dimension_that_is_not_there_multiplies() -> None:
    x = uniform(np.random.default_rng(0), ("M", "K"), (2, 3))
    nine = A.mul(A.sum(x, ("K",)), A.constant(9.0))
    assert same(A.sum(x, ("K", "L"), {"L": 9}), nine)
    with pytest.raises(KeyError):
        A.sum(x, ("L",))


@rows
@given(residues(8))
def test_max_laws(x: FieldValue) -> None:
    assert x.q is not None
    whole = A.max(x, ("M",))
    assert whole.q is not None
    assert (int(whole.p), int(whole.q)) in set(zip(x.p.tolist(), x.q.tolist(), strict=True))
    parts = FieldValue(("A", "B"), x.p.reshape(2, 4), x.q.reshape(2, 4))
    assert same(A.max(A.max(parts, ("A",)), ("B",)), whole)
    assert same(A.max(A.max(parts, ("B",)), ("A",)), whole)
    turned = FieldValue(("M",), x.p[::-1].copy(), x.q[::-1].copy())
    assert same(A.max(turned, ("M",)), whole)
    twice = FieldValue(("M",), np.tile(x.p, 2), np.tile(x.q, 2))
    assert same(A.max(twice, ("M",)), whole)
    assert A.max(x.without_q(), ("M",)).p == whole.p or len(set(x.p.tolist())) < 8


def test_max_leaves_out_what_is_not_valid() -> None:
    x = uniform(np.random.default_rng(0), ("L", "K"), (3, 4))
    valid = np.arange(12).reshape(3, 4) < 7  # the last row is empty
    partial = A.max(x, ("K",), (("L", "K"), valid))
    assert partial.p[2] == HIDDEN
    flat = FieldValue(("K",), x.p.reshape(-1)[:7], None if x.q is None else x.q.reshape(-1)[:7])
    assert same(A.max(partial, ("L",)), A.max(flat, ("K",)))


def test_shifts_are_fresh_values() -> None:
    x = uniform(np.random.default_rng(0), ("M", "K"), (3, 4))
    a = FieldAlgebra(0, shifts=np.random.default_rng(1))
    m, n = a.max(x, ("K",)), a.max(x, ("K",))
    assert m.dims == ("M",) and m.p.shape == (3,) and not same(m, n) and a.used_max


def test_key_ignores_the_order_of_dimensions() -> None:
    x = uniform(np.random.default_rng(0), ("M", "K"), (3, 3))
    assert x.q is not None
    assert same(x, FieldValue(("K", "M"), x.p.T, x.q.T))
    assert not same(x, FieldValue(("M", "K"), x.p.T, x.q.T))
    assert not same(x, x.without_q())
