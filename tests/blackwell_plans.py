"""Small plans for B200 of every skeleton, for verifiers that look at every instruction.

Not among them, since SentryWard does not follow branches on what memory holds: meetings of all
blocks of a grid (sums over rows, keys or K over the grid), lengths, tables of pages, labels of rows
in a cluster, rows that an index puts somewhere. The machine of `tests.ptx` runs those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutesuper as cs
from cutesuper.ir.unseen import followed
from cutesuper.search.search import SearchOptions, search
from cutesuper.skeletons.attention.schedule import AttentionSchedule
from cutesuper.skeletons.matmul.schedule import MatmulSchedule
from cutesuper.skeletons.planner import make_plan
from cutesuper.targets import B200
from tests import row_programs as loops
from tests import zoo
from tests.attention import Attention
from tests.plans import Linear, rows_plan, specs, whole_plan

BF16 = "bfloat16"
#: verdicts: nothing is wrong in any schedule; the output is equal to the reference, too; two
#: accesses that nothing orders
FREE, PROVED, UNORDERED = "race_free", "verified", "potential_race"
ROOT = "torch.sqrt((X * X).mean(dim=1, keepdim=True) + 1e-6)"
NORM = f"(X @ W) / {ROOT}"


@dataclass(frozen=True)
class Case:
    """A kernel to verify.

    Attributes:
        make: its plan.
        reference: that it is proved equal to; "" if only its protocol is checked: the verifier does
            not follow values through `st.async`, `stmatrix`, run-time predicates and fp16.
        races: the accesses of every pair that nothing orders.
    """

    make: Callable[[], Any]
    reference: str = ""
    races: tuple[str, str] | None = None

    @property
    def result(self) -> str:
        """The verdict."""
        return UNORDERED if self.races else PROVED if self.reference else FREE


def few(schedule: Any = None, dependent_launch: bool = False, **fields: Any) -> Any:
    """A small `Linear` in bf16: two iterations, 8 rows, 64 columns."""
    small = {"dtype": BF16, "m": 8, "tile_m": 8, "n": 64, "k": 128, "tile_k": 64}
    options = {"schedule": schedule, "dependent_launch": dependent_launch}
    return Linear(**(small | fields)).plan(B200, **options)


def planned(mu: Any, schedule: Any = None) -> Any:
    """The plan of the only kernel of a muGraph."""
    [step] = mu.steps
    return make_plan(step, followed(mu), B200, schedule)


def attention(schedule: Any = None, **fields: Any) -> Any:
    """A small `Attention` in bf16: one head, two tiles of keys."""
    small = {"dtype": BF16, "heads": 1, "keys": 128}
    return planned(Attention(**(small | fields)).mugraph(), schedule)


def found(graph: Any) -> Any:
    """A whole graph as one matmul kernel."""
    return whole_plan(graph, B200)


def best(graph: Any) -> Any:
    """The search's first choice, one kernel."""
    return planned(search(graph, B200, options=SearchOptions(lowered=True)).candidates[0].mugraph)


def rows(*kinds: str, n: int = 256, **options: Any) -> Any:
    """A row kernel on four rows, in bf16."""
    return rows_plan(4, n, *kinds, target=B200, **({"dtype": BF16} | options))


def double(schedule: Any = None, **fields: Any) -> Any:
    """A small `Linear` whose instructions take two blocks of columns: weights (N, K)."""
    small: dict[str, Any] = {
        "m": 16,
        "tile_m": 16,
        "n": 128,
        "tile_n": 128,
        "transposed": True,
        "norm": False,
    }
    plan = few(schedule, **(small | fields))
    assert plan.doubles
    return plan


def joint(knobs: dict[str, Any] | None = None, result: str = BF16, **fields: Any) -> Any:
    """A small `Linear` of pairs of blocks whose products are joint; its ring goes round. Both have
    all of their tensor memory, so they take more than half of shared memory."""
    small: dict[str, Any] = {
        "dtype": BF16,
        "m": 32,
        "tile_m": 32,
        "n": 512,
        "tile_n": 256,
        "k": 320,
        "tile_k": 64,
        "transposed": True,
        "norm": False,
    }
    linear = Linear(**(small | fields))
    tensors = specs(linear.shapes(), linear.dtype, Z=result)
    stored = result == BF16  # in bulk: through the ring the verifier loses addresses
    known: dict[str, Any] = {"stages": 4, "head": 2, "share_rows": 2, "bulk_store": stored}
    schedule = MatmulSchedule(joint=True, **(known | (knobs or {})))
    return make_plan(linear.block().step("linear"), tensors, B200, schedule)


def issued(
    knobs: dict[str, Any] | None = None, make: Callable[..., Any] = few, **fields: Any
) -> Any:
    """A small `Linear` whose products a warp of its own issues; its ring goes round."""
    schedule = MatmulSchedule(issuer=True, **({"stages": 2, "head": 1} | (knobs or {})))
    return make(schedule, **({"k": 256, "norm": False} | fields))


def with_issuer(plan: Any) -> Any:
    """A plan of the search whose products a warp of its own issues."""
    return replace(plan, schedule=replace(plan.schedule, issuer=True))


def embedded() -> Any:
    """Norms of rows that an index names."""
    g = cs.new_kernel_graph()
    w, ids = g.new_input((16, 256), BF16, name="W"), g.new_input((4,), "int64", name="ids")
    g.mark_output(g.rms_norm(g.take_rows(w, ids)))
    return g


#: those of CI, which take a few seconds each
QUICK = {
    "product": Case(lambda: few(norm=False), "X @ W"),
    "prologue": Case(lambda: few(gain=True)),
    "cluster along K": Case(lambda: few(cluster=2, k=256)),
    # an instruction of 64 columns reads behind boxes of 16; those results are not used
    "narrow boxes": Case(lambda: found(zoo.lora(8, 128, 64, dtype=BF16)), races=("write", "read")),
    "attention": Case(attention),
    "rows, softmax": Case(lambda: best(zoo.rows("softmax", (4, 256), BF16))),
    "rows by an index": Case(lambda: best(embedded())),
}
#: the others: minutes
MORE = {
    "ragged": Case(lambda: few(norm=False, m=12, n=72, k=136, bias=True, residual=True)),
    "two results": Case(lambda: found(zoo.gated_mlp(8, 128, 64, dtype=BF16))),
    "reduced columns": Case(lambda: found(zoo.dlrm(8, 128, 64, dtype=BF16))),
    "norm": Case(few, NORM),
    "norm, weights (N, K)": Case(lambda: few(transposed=True), f"(X @ W.t()) / {ROOT}"),
    "fp16": Case(lambda: few(norm=False, dtype="float16")),
    "prologue, cluster along K": Case(lambda: few(gain=True, cluster=2, k=256)),
    "bulk stores": Case(lambda: few(m=64, tile_m=64)),
    "bulk loads of a residual": Case(
        lambda: few(m=96, tile_m=96, n=128, tile_n=128, residual=True, norm=False)
    ),
    "pairs": Case(lambda: few(m=128, tile_m=128, n=512, tile_n=256)),
    "copied operands": Case(lambda: few(norm=False, k=133, n=67)),
    "product after the loop": Case(
        lambda: found(zoo.lora(8, 128, 64, 40, BF16, transposed=True, scale=0.5))
    ),
    "product of a tensor after the loop": Case(
        lambda: found(zoo.two_operands(8, 128, 64, dtype=BF16))
    ),
    "layer norm": Case(lambda: found(zoo.layer_norm_linear(8, 128, 64, dtype=BF16))),
    "norm of a product": Case(lambda: found(zoo.rms_norm_of_product(8, 128, 128, dtype=BF16))),
    "activation": Case(lambda: found(zoo.linear(8, 128, 64, BF16, "silu"))),
    "two layers": Case(lambda: found(zoo.relu_mlp(8, 128, 64, 64, BF16))),
    "rows operand stored (K, M)": Case(
        lambda: few(norm=False, turned=True, transposed=True, m=64, tile_m=64)
    ),
    "operands swapped": Case(lambda: few(swapped=True), NORM),
    "bias": Case(lambda: few(norm=False, bias=True), "X @ W + B"),
    "residual": Case(lambda: few(norm=False, residual=True)),
    "prologue, bias, residual": Case(lambda: few(gain=True, bias=True, residual=True)),
    "two blocks of columns": Case(lambda: few(norm=False, n=128, tile_n=128), "X @ W"),
    # the last piece of rows begins within the one before, and stores some of them again
    "rows stored twice": Case(
        lambda: few(norm=False, m=48, tile_m=48), races=("write", "write")
    ),
    "fp32": Case(lambda: few(dtype="float32", norm=False, k=64, tile_k=32)),
    "fp32, norm": Case(lambda: few(dtype="float32")),
    "fp32, rounded": Case(lambda: few(dtype="float32", precision="high", tile_k=32)),
    "two blocks of columns at once": Case(double, "X @ W.T"),
    "two blocks at once, norm": Case(
        lambda: double(norm=True), f"(X @ W.T) / {ROOT}"
    ),
    "two blocks at once, two warpgroups, bulk stores": Case(
        lambda: double(n=256, tile_n=256, m=96, tile_m=96)
    ),
    "two blocks at once, pairs": Case(
        lambda: double(n=512, tile_n=256, m=128, tile_m=128, norm=True)
    ),
    "two blocks at once, cluster along K": Case(lambda: double(cluster=2, k=256, norm=True)),
    "two blocks at once, fp32": Case(
        lambda: double(dtype="float32", precision="high", tile_k=32)
    ),
    "joint products": Case(lambda: joint(result="float32", k=128), "X @ W.T"),
    "joint products, a ring that goes round": Case(joint),
    "joint products, two warpgroups, norm": Case(lambda: joint({"warpgroups": 2}, norm=True)),
    "joint products, prologue": Case(lambda: joint(gain=True, norm=True)),
    "joint products, walk": Case(lambda: joint({"persistent": 2}, m=64, k=128)),
    "joint products, handed out": Case(
        lambda: joint({"persistent": 2, "hand_out": True}, m=64, k=128)
    ),
    "joint products, fp32": Case(
        lambda: joint(result="float32", dtype="float32", precision="high", k=160, tile_k=32)
    ),
    "K tiles of 128": Case(lambda: few(k=256, tile_k=128)),
    "fp16, norm": Case(lambda: few(dtype="float16")),
    "cluster of four": Case(lambda: few(cluster=4, k=512)),
    "two tiles of rows": Case(lambda: few(norm=False, m=16), "X @ W"),
    "dependent launch": Case(lambda: few(dependent_launch=True)),
    "a ring that goes round": Case(
        lambda: few(MatmulSchedule(stages=2, head=1), norm=False, k=256)
    ),
    "walk over tiles": Case(
        lambda: few(MatmulSchedule(stages=3, head=2, persistent=1), norm=False, m=64, tile_m=64,
                    n=128, tile_n=64)
    ),
    "tiles handed out": Case(
        lambda: few(MatmulSchedule(stages=3, head=2, persistent=2, hand_out=True), norm=False,
                    m=192, tile_m=64, n=128, tile_n=64)
    ),
    "tiles handed out, statistics": Case(
        lambda: few(MatmulSchedule(stages=2, head=2, persistent=2, hand_out=True),
                    m=128, tile_m=64, n=128, tile_n=64, k=192)
    ),
    "tiles handed out to pairs": Case(
        lambda: few(MatmulSchedule(stages=2, head=2, persistent=2, share_rows=2, hand_out=True),
                    norm=False, m=32, tile_m=16, n=128, tile_n=64)
    ),
    "products of two widths": Case(lambda: found(zoo.projections(8, 128, (128, 64), BF16))),
    "gated products": Case(lambda: found(zoo.projections(8, 128, (64, 64), BF16, gated=True))),
    "softmax of a product": Case(lambda: found(zoo.softmax_linear(8, 128, 64, BF16))),
    "sums of columns": Case(lambda: found(zoo.less_column_sums(8, 128, 64, BF16))),
    "shifted statistics": Case(lambda: found(zoo.over_deviation(8, 128, 64, BF16))),
    "an issuer": Case(issued, "X @ W"),
    "an issuer, norm": Case(lambda: issued(norm=True), NORM),
    "an issuer, prologue": Case(lambda: issued(gain=True, norm=True)),
    "an issuer, two warpgroups, bulk stores": Case(
        lambda: issued({"warpgroups": 2, "bulk_store": True, "stages": 3}, double, n=256,
                       tile_n=256, m=96, tile_m=96)
    ),
    "an issuer, cluster along K": Case(lambda: issued(cluster=2, k=512)),
    "an issuer, copied operands": Case(lambda: issued(k=133, n=67)),
    "an issuer, vectors": Case(
        lambda: with_issuer(found(zoo.layer_norm_linear(8, 128, 64, dtype=BF16)))
    ),
    "an issuer, walk": Case(
        lambda: issued({"persistent": 1, "bulk_store": True}, m=64, tile_m=64, n=128, tile_n=64)
    ),
    "an issuer, walk with statistics": Case(
        lambda: issued({"persistent": 1, "bulk_store": True}, m=64, tile_m=32, k=192, norm=True)
    ),
    "an issuer, tiles handed out": Case(
        lambda: issued({"persistent": 2, "hand_out": True, "stages": 3}, m=192, tile_m=64, n=128,
                       tile_n=64)
    ),
    "an issuer, pairs": Case(
        lambda: issued({"share_rows": 2}, m=32, tile_m=16, n=128, tile_n=64)
    ),
    "an issuer, pairs that walk": Case(
        lambda: issued({"share_rows": 2, "persistent": 2, "bulk_store": True}, m=64, tile_m=32,
                       n=128, tile_n=64, k=192)
    ),
    "attention, two warpgroups of rows": Case(
        lambda: attention(
            AttentionSchedule(2, 2, 1, overlapped=True, stream_keys=False), rows=128, row_tile=128
        )
    ),
    "attention, 128 rows at once": Case(lambda: attention(rows=128, row_tile=128)),
    "attention, 128 rows at once, one tile after the other": Case(
        lambda: attention(
            AttentionSchedule(2, 2, 1, together=True, stream_keys=False), rows=128, row_tile=128
        )
    ),
    "attention, 128 rows at once, causal": Case(
        lambda: attention(rows=150, row_tile=128, causal="bottom_right", keys=170)
    ),
    "attention, 7 heads at once": Case(lambda: attention(group=7, rows=20, row_tile=17)),
    "attention, 128 rows at once, norms": Case(
        lambda: attention(rows=128, row_tile=128, norm="Q")
    ),
    "attention, 128 rows at once in a cluster": Case(
        lambda: attention(rows=128, row_tile=128, keys=256, cluster=2)
    ),
    "attention, causal": Case(lambda: attention(rows=128, causal="top_left")),
    "attention, causal at the end": Case(lambda: attention(rows=64, causal="bottom_right")),
    "attention, ragged": Case(lambda: attention(rows=37, keys=100)),
    "attention, few rows": Case(lambda: attention(rows=9, row_tile=9)),
    "attention, wide": Case(lambda: attention(width=128)),
    "attention, 40 wide": Case(lambda: attention(width=40)),
    "attention, 96 wide": Case(lambda: attention(width=96)),
    "attention, keys in the last dimension": Case(lambda: attention(keys_last=True)),
    "attention, norms": Case(lambda: attention(norm="QV")),
    "attention, norms of queries and keys": Case(lambda: attention(norm="QK")),
    "attention, tiles of 128 keys": Case(lambda: attention(key_tile=128, keys=256)),
    "attention, fp16": Case(lambda: attention(dtype="float16")),
    "attention, no scale": Case(lambda: attention(scale=None)),
    "attention, found": Case(lambda: best(zoo.grouped_attention(1, 64, 128, 64, BF16))),
    # so much shared memory that two of its blocks share the tensor memory of a multiprocessor
    "decoding in a cluster": Case(
        lambda: attention(AttentionSchedule(stages=5, key_groups=1), rows=0, group=4, keys=256,
                          cluster=2)
    ),
    "rows": Case(lambda: rows(norm=True), f"X / {ROOT}"),
    "rows, exp": Case(lambda: rows("exp"), "torch.exp(X)"),
    "rows, an activation": Case(lambda: rows("silu")),
    "rows, tanh": Case(lambda: rows("tanh")),
    "rows, fp16": Case(lambda: rows("exp", dtype="float16")),
    "rows, fp32": Case(lambda: rows(norm=True, dtype="float32"), f"X / {ROOT}"),
    "rows, odd": Case(lambda: rows(norm=True, n=333)),
    "rows, one warp": Case(lambda: rows(norm=True, n=64)),
    "rows, norm": Case(lambda: best(zoo.rows("rms_norm", (4, 256), BF16))),
    "rows in a cluster, softmax": Case(lambda: planned(loops.softmax_forward(2, 1024, 2)[1])),
    "rows in a cluster, norm": Case(lambda: planned(loops.rms_forward(2, 1024, 2)[1])),
    "rows, causal": Case(lambda: planned(loops.causal_softmax(4, 256)[1])),
    "rows, losses": Case(lambda: planned(loops.losses(4, 256)[1])),
    "rows, shares": Case(lambda: planned(loops.shares(4, 256)[1])),
}  # fmt: skip
CASES = QUICK | MORE
