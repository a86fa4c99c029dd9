"""Attention in the benchmarks: workloads, fused calls and their layouts, the commands, tables."""

from __future__ import annotations

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import cutesuper as cs
from benchmarks import ahead, attention, attention_peers, prefill, report, sweep
from benchmarks.peers import Implementation, Launcher
from benchmarks.problem import SetPlan, make_problem, slab_bytes
from benchmarks.sweep import Item, Sweep
from benchmarks.workloads import MEASURED
from benchmarks.workloads_attention import (
    decode,
    grouped_attention,
    lengths_of,
    normed_attention,
    serving,
)
from benchmarks.workloads_attention import prefill as prefill_workload
from cutesuper.ir.evaluate import evaluate
from tests.benchmark_fakes import FLOORS, KNOBS, FakeBackend
from tests.test_benchmarks_sweep import Clock, eager_like

#: workloads at extents of which no two are equal, and shared keys where there are heads
SMALL = {
    "gqa": (grouped_attention(), (3, 6, 40, 16)),
    "qk_norm": (normed_attention(), (3, 6, 40, 16)),
    "decode": (decode(), (3, 40, 8, 2, 16)),
    "prefill": (prefill_workload(), (3, 24, 8, 2, 16)),
    "serving": (serving(), (3, 40, 8, 2, 16)),
    "serving_pages_16": (serving(16), (3, 48, 8, 2, 16)),
    "serving_pages_128": (serving(128), (2, 256, 8, 2, 16)),
}
ALL = pytest.mark.parametrize("name", SMALL)


def problem_of(name, dtype=torch.float64):
    workload, shape = SMALL[name]
    specs = (*workload.inputs(shape), *workload.outputs(shape))
    return make_problem(
        workload, shape, "float16", dtype, device=torch.device("cpu"), multiprocessors=132,
        plan=SetPlan(2, slab_bytes(specs, dtype), True), seed=0,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- workloads


@ALL
def test_programs_and_pytorch_compute_the_reference(name):
    problem = problem_of(name)
    workload, shape, inputs = problem.workload, problem.shape, problem.inputs[0]
    full = workload.computations["full"]
    [reference] = full.reference(*inputs)
    [eager] = full.eager(*inputs)
    [ours] = evaluate(workload.graph(cs, shape, "bfloat16"), list(inputs), torch.float64)
    assert tuple(reference.shape) == workload.outputs(shape)[0].dims
    torch.testing.assert_close(eager, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_prefill_sees_no_later_token():
    problem = problem_of("prefill")
    q, k, v = problem.inputs[0]
    full = problem.workload.computations["full"].reference
    [before] = full(q, k, v)
    v = v.clone()
    v[..., 10:, :] += 1
    [after] = full(q, k, v)
    assert torch.equal(after[..., :10, :], before[..., :10, :])
    assert (after != before)[..., 10:, :].all()


def test_bytes_and_operations():
    gqa, shape = SMALL["gqa"]
    assert gqa.bytes_moved(shape, torch.float16) == 2 * 3 * (2 * 6 * 16 + 2 * 40 * 16)
    assert gqa.flops(shape) == 4 * 3 * 6 * 40 * 16
    one, shape = SMALL["decode"]
    assert one.bytes_moved(shape, torch.bfloat16) == 2 * 3 * (2 * 8 * 16 + 2 * 2 * 40 * 16)
    assert one.flops(shape) == 4 * 3 * 8 * 40 * 16
    many, shape = SMALL["prefill"]
    assert many.bytes_moved(shape, torch.bfloat16) == 2 * 3 * 24 * 16 * (2 * 8 + 2 * 2)
    assert many.flops(shape) == 2 * 3 * 8 * 24 * 24 * 16
    mixed, shape = SMALL["serving_pages_16"]
    keys = sum(lengths_of(3, 48))
    assert 48 < keys < 3 * 48
    moved = 2 * (2 * 3 * 8 * 16 + 2 * keys * 2 * 16) + 4 * (3 + 3 * 3)
    assert mixed.bytes_moved(shape, torch.bfloat16) == moved
    assert mixed.flops(shape) == 4 * keys * 8 * 16


def test_lengths_and_tables_are_the_same_integers_in_every_set():
    problem = problem_of("serving_pages_16")
    for q, k, _, lengths, table in problem.inputs:
        assert lengths.tolist() == list(lengths_of(3, 48)) and lengths.dtype == torch.int32
        assert sorted(table.flatten().tolist()) == list(range(k.shape[0]))
        assert table.shape == (3, 3) and q.dtype == torch.float64
    assert max(lengths_of(32, 8192)) == lengths_of(32, 8192)[0] == 8192


@pytest.mark.parametrize("name", ["serving", "serving_pages_16"])
def test_keys_beyond_a_length_do_not_count(name):
    problem = problem_of(name)
    q, k, v, lengths, *table = problem.inputs[0]
    full = problem.workload.computations["full"].reference
    [before] = full(q, k, v, lengths, *table)
    shorter = lengths.clone()
    shorter[0] -= 1
    [after] = full(q, k, v, shorter, *table)
    assert (after[0] != before[0]).all()
    assert torch.equal(after[1:], before[1:])


# ------------------------------------------------------------------------------------- fused calls


def compare(problem, launcher):
    for i in range(problem.plan.count):
        [y] = launcher.launch(i)
        [reference] = problem.workload.computations["full"].reference(*problem.inputs[i])
        torch.testing.assert_close(y, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in SMALL if "pages" not in name])
def test_sdpa_computes_the_workload(name):
    problem = problem_of(name)
    compare(problem, attention_peers.sdpa(SDPBackend.MATH)(problem))


@pytest.mark.parametrize("name", ["gqa", "qk_norm", "decode", "serving"])
def test_heads_that_share_keys_can_be_packed(name, monkeypatch):
    seen = []
    real = F.scaled_dot_product_attention

    def watched(q, k, v, mask, **options):
        seen.append((q.shape[1] == k.shape[1], options["enable_gqa"]))
        return real(q, k, v, mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    problem = problem_of(name)
    compare(problem, attention_peers.sdpa(SDPBackend.MATH, packed=True)(problem))
    assert seen == [(True, False)] * 2


@pytest.fixture
def flash_attn(monkeypatch):
    """A stand-in for flash_attn.cute that computes with SDPA; collects the layouts it was given."""
    calls = []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        calls.append((q, k, v))
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        y = F.scaled_dot_product_attention(
            *heads, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return y.transpose(1, 2).contiguous(), None

    def flash_attn_varlen_func(q, k, v, seqused_k, page_table=None, **options):
        calls.append((q, k, v))
        if page_table is not None:
            k, v = (c[page_table].flatten(1, 2) for c in (k, v))
        rows = [
            flash_attn_func(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], **options)[0]
            for b, n in enumerate(seqused_k.tolist())
        ]
        return torch.cat(rows), None

    package, module = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return calls


@ALL
def test_flash_attention_gets_compact_tensors_in_its_layout(name, flash_attn):
    problem = problem_of(name)
    compare(problem, attention_peers.flash_attention_4(problem))
    q, k, v = flash_attn[0]
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    batch, length, heads, kv_heads, keys = {
        "gqa": (3, 6, 1, 1, 40), "qk_norm": (3, 6, 1, 1, 40), "decode": (3, 1, 8, 2, 40),
        "prefill": (3, 24, 8, 2, 24), "serving": (3, 1, 8, 2, 40),
        "serving_pages_16": (3, 1, 8, 2, 16), "serving_pages_128": (2, 1, 8, 2, 128),
    }[name]  # fmt: skip
    assert q.shape == (batch, length, heads, 16)
    assert k.shape == v.shape == (9 if "_16" in name else 4 if "_128" in name else batch, keys,
                                  kv_heads, 16)  # fmt: skip


def test_nothing_is_copied_in_a_call(flash_attn):
    """But by norms."""
    problem = problem_of("prefill")
    launcher = attention_peers.flash_attention_4(problem)
    launcher.launch(0), launcher.launch(0)
    first, second = flash_attn
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_fused_calls_refuse_other_workloads():
    problem = replace(problem_of("gqa"), workload=MEASURED["lora"])
    with pytest.raises(ValueError, match="lora: a call for attention cannot compute it"):
        attention_peers.sdpa(SDPBackend.MATH)(problem)
    with pytest.raises(ValueError, match="knows no pages"):
        attention_peers.sdpa(SDPBackend.MATH)(problem_of("serving_pages_16"))


# ------------------------------------------------------------------------------- programs ahead


class Counted(ThreadPoolExecutor):
    """Threads in place of processes; how many searches were asked for at a time."""

    asked: ClassVar[list[int]] = []

    def __init__(self, count):
        Counted.asked.append(count)
        super().__init__(1)


def test_programs_are_found_before_they_are_needed(monkeypatch):
    """Once for each way of launching; what fails does so in its case."""
    workload, shape = SMALL["decode"]
    items = [
        Item("a", workload, shape, dtype="bfloat16"), Item("b", workload, (2, *shape[1:])),
    ]  # fmt: skip
    found, used, late = [], [], []

    def search(graph, options):
        if graph.nodes[0].shape[0] == 2:
            raise cs.errors.SearchError("no program")
        found.append(options.dependent_launch)
        return "result", "choice"

    def compiled(graph, options, cache, result, choice):
        used.append((result, choice, options.dependent_launch))

    monkeypatch.setattr(ahead, "find_and_compile", search)
    monkeypatch.setattr(ahead, "compiled", compiled)
    monkeypatch.setattr(ahead, "Kernel", lambda graph, target, make: make({}))
    monkeypatch.setattr(ahead, "superoptimized", lambda problem, dependent: late.append(dependent))
    monkeypatch.setattr(Counted, "asked", [])
    programs = ahead.Ahead(Counted)
    programs.prepare(items, ["cutesuper", "cutesuper-pdl", "eager"])
    assert Counted.asked == [4]
    assert sorted(found) == [False, True]
    kernels = {i.name: i for i in programs.implementations()}
    mine = replace(problem_of("decode", torch.bfloat16), dtype_name="bfloat16")
    kernels["cutesuper-pdl"].make(mine)
    assert used == [("result", "choice", True)]
    kernels["cutesuper"].make(replace(mine, dtype_name="float16"))
    assert late == [False]
    with pytest.raises(cs.errors.SearchError, match="no program"):
        kernels["cutesuper"].make(replace(mine, shape=(2, *shape[1:]), dtype_name="float16"))
    assert late == [False]


def test_only_programs_that_take_part_are_searched(monkeypatch):
    workload, shape = SMALL["decode"]
    monkeypatch.setattr(Counted, "asked", [])
    programs = ahead.Ahead(Counted)
    programs.prepare([Item("a", workload, shape)], ["eager", "fa4"])
    programs.prepare([], ["cutesuper"])
    assert Counted.asked == []


def test_what_another_process_finds_can_be_called():
    """The real thing, but for the process: a program found, pickled or not, is a `Kernel`."""
    pytest.importorskip("cutlass")
    workload, shape = MEASURED["rmsnorm_linear"], (4, 64, 64)
    programs = ahead.Ahead(Counted)
    programs.prepare([Item("a", workload, shape)], ["cutesuper"])
    [(graph, options, found)] = programs._found.values()
    ready = ahead.compiled(graph, options, ahead.KernelCache(), *found)
    assert all(step.artifact.from_cache for step in ready.steps)


# ------------------------------------------------------------------------------------ command lines


def test_cases_are_chosen_by_group_or_name():
    keys = [item.key for item in attention.chosen(None)]
    assert keys[:2] == ["few/gqa/2x256x4096x64", "few/gqa/16x256x4096x64"]
    assert keys[4:] == ["decode/1x4096", "decode/1x16384", "decode/1x65536", "decode/8x4096",
                        "decode/32x4096"]  # fmt: skip
    assert [i.key for i in attention.chosen("decode/8x4096,few/qk_norm")] == [
        "few/qk_norm/2x256x4096x64", "few/qk_norm/16x256x4096x64", "decode/8x4096"
    ]  # fmt: skip
    assert len(attention.chosen("models")) == 9
    with pytest.raises(ValueError, match="--only 'decode/8': one of few, decode"):
        attention.chosen("decode/8")


def test_models_have_their_heads():
    shapes = {i.key: i.shape for i in attention.chosen("models")}
    assert shapes["models/llama3-70b/4"] == (4, 4096, 64, 8, 128)
    assert shapes["models/qwen3-14b/16"] == (16, 4096, 40, 8, 128)


@pytest.fixture
def scripted(monkeypatch):
    """The command lines on the scripted backend at small extents; everybody is PyTorch."""
    runs, for_real = [], sweep.run

    def run(wanted, settings, **options):
        runs.append(wanted)
        items = tuple(
            replace(i, shape=SMALL[i.workload.name][1], dtype="float32") for i in wanted.items
        )
        everybody = tuple(
            eager_like(i.name, i.kind) for i in wanted.implementations if i.kind != "floor"
        )
        tiny = Sweep(wanted.kind, wanted.title, items, (*FLOORS, *everybody))
        return for_real(tiny, KNOBS, backend=Clock(), **options)

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return runs


def test_one_run_fills_both_tables(scripted, tmp_path):
    path, document = tmp_path / "attention.json", tmp_path / "README.md"
    assert attention.main(["--json", str(path)], "") == 0
    document.write_text("<!-- bench:attention -->\n<!-- /bench:attention -->\n")
    assert report.main(["--page", str(document), str(path)]) == 0
    text = document.read_text()
    # recordings: two floors, ours twice, eager, compile, compile-max, three of SDPA, fa4
    assert (
        "| GQA: softmax(Q K) V, float32 | 3x6x40x16 | 5.00 | 6.00 | 7.00 | 8.00 (flash) | 11.00 "
        "| 1.00 / 2.00 | 6.0 | 3.00 | 4.00 | 1.67x / 1.25x |"
    ) in text
    # decoding is not compiled
    assert (
        "| decoding, one token, float32 | 3x40x8x2x16 | 5.00 | 6.00 (flash) | 9.00 | 1.00 / 2.00 "
        "| 62.5 | 3.00 | 4.00 | 1.67x / 1.25x |"
    ) in text
    assert scripted[0].prepare is not None


def test_prefill_states_rates(scripted, tmp_path):
    path, document = tmp_path / "prefill.json", tmp_path / "README.md"
    assert prefill.main(["--tokens", "2048,8192", "--json", str(path)], "") == 0
    document.write_text("<!-- bench:prefill -->\n<!-- /bench:prefill -->\n")
    assert report.main(["--page", str(document), str(path)]) == 0
    text = document.read_text()
    assert "| tokens | SDPA (best) | FlashAttention-4 | **cutesuper** |" in text
    # 442 kFLOP in 5 us are 0.09 TFLOP/s
    assert "| 24 | 5.00 (flash): 0 | 7.00: 0 | 3.00: 0 | 4.00: 0 | 1.67x / 1.25x |" in text
    names = {i.name for i in scripted[0].implementations}
    assert {"sdpa-cudnn", "fa4", "cutesuper-pdl"} < names
    assert "sdpa-efficient" not in names


def test_lengths_and_pages_run(scripted, tmp_path):
    path = tmp_path / "attention.json"
    assert attention.main(["--only", "lengths", "--json", str(path)], "") == 0
    cases = report.load_results(path)["cases"]
    assert len(cases) == 12
    paged = [{e["name"] for e in c["implementations"]} for c in cases if "pages" in c["key"]]
    assert all("fa4" in names and "sdpa-flash" not in names for names in paged)
    assert {e["status"] for case in cases for e in case["implementations"]} == {"ok"}


def test_the_best_of_several_kernels_is_named_and_refusals_are_listed(scripted, tmp_path):
    path = tmp_path / "attention.json"
    attention.main(["--only", "decode/1x4096", "--json", str(path)], "")
    results = report.load_results(path)
    [case] = results["cases"]
    entries = {e["name"]: e for e in case["implementations"]}
    why = "prepare: RuntimeError: No available kernel. Aborting execution."
    entries["sdpa-flash"] |= {"time_us": None, "status": "failed", "error": why}
    entries["sdpa-efficient"]["time_us"]["median"] = 2.5
    entries["fa4"] |= {"time_us": None, "status": "wrong", "error": "before timing: rms error"}
    results["environment"]["flash_attn_4"] = "4.0.0b36"
    text = report.KINDS["attention"].markdown(results)
    assert "| 5.00 | 2.50 (efficient) | wrong | 1.00 / 2.00 |" in text
    assert f"sdpa-flash: failed: {why}" in text
    assert "fa4: wrong: before timing: rms error" in text
    assert "1 loss; loss: decoding, one token 3x40x8x2x16 (0.833x)." in text
    assert text.endswith(", flash-attn-4 4.0.0b36.")


@pytest.mark.parametrize("command", [attention, prefill])
@pytest.mark.parametrize(
    "arguments", [["--peers", "matmul-alone"], ["--skip", "x"], ["--rounds", "0"]]
)
def test_wrong_arguments(command, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments, "")
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- sweeps


def test_cases_have_their_own_types_and_peers():
    workload, shape = SMALL["decode"]
    items = (
        Item("half", workload, shape, absent=frozenset({"compile"})),
        Item("single", workload, shape, dtype="bfloat16"),
    )
    prepared = []
    wanted = Sweep(
        "attention", "", items, (*FLOORS, eager_like("cutesuper"), eager_like("compile", "peer")),
        prepare=lambda missing: prepared.append([item.key for item in missing]),
    )  # fmt: skip
    results = sweep.run(wanted, KNOBS, backend=Clock())
    half, single = results["cases"]
    assert (half["dtype"], single["dtype"]) == ("float16", "bfloat16")
    names = [{e["name"] for e in case["implementations"]} for case in results["cases"]]
    assert names[1] - names[0] == {"compile"}
    assert "float16" in report.case_title(half, results)
    assert "bfloat16" in report.case_title(single, results)
    # complete: who is absent is not missed
    again = sweep.run(wanted, KNOBS, backend=FakeBackend(), earlier=results)
    assert again["cases"] == results["cases"]
    assert prepared == [["half", "single"], []]


def test_a_program_that_was_not_prepared_has_its_error_in_its_case():
    def fails(_):
        raise cs.errors.SearchError("no program for it")

    workload, shape = SMALL["gqa"]
    broken = Implementation("cutesuper", "ours", fails)
    fine = Implementation("fa4", "peer", lambda p: Launcher(
        lambda i: p.workload.computations["full"].eager(*p.inputs[i])
    ))  # fmt: skip
    wanted = Sweep("attention", "", (Item("a", workload, shape),), (*FLOORS, broken, fine))
    [case] = sweep.run(wanted, KNOBS, backend=Clock())["cases"]
    entries = {e["name"]: e for e in case["implementations"]}
    assert entries["cutesuper"]["error"] == "prepare: SearchError: no program for it"
    assert entries["fa4"]["status"] == "ok"
