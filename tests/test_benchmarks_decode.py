"""Steps of a model in the benchmarks: the case, who takes part, the command, its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import decode, decode_problem, report, sweep
from benchmarks.decode_peers import IMPLEMENTATIONS
from benchmarks.decode_problem import DecodeCase, decode_workload
from benchmarks.harness import Monitor
from benchmarks.peers import Implementation, Launcher, choose
from benchmarks.sweep import Item, Sweep
from benchmarks.workloads import MEASURED
from examples.llama.decode import LLAMA_3_8B, Shape, exact_logits, new_model
from tests.benchmark_fakes import FLOORS, KNOBS, entries_of
from tests.compiling import leave_inductor_out, taken
from tests.test_benchmarks_sweep import Clock

#: such that two parts are products of one shape, twice
TINY = Shape(vocabulary=128, width=64, layers=2, heads=4, groups=2, head=16, hidden=64)
SHAPE = (3, 16, 2)
STEPS = ("cutesuper", "cutesuper-backend", "eager", "eager-graph", "compile")
WORKLOAD = decode_workload(TINY, "tiny", (SHAPE,))


class Stage(Clock):
    """Knows what is not recorded: it takes 9 us."""

    def time_round(self, recordings, flush):
        for r in recordings:
            if isinstance(r, decode_problem.Uncaptured):
                r.label, r.count = 8, 1
        return super().time_round(recordings, flush)


@pytest.fixture(autouse=True)
def reports(monkeypatch):
    """Compiled by what needs no compiler; one thread, since two on a busy machine wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield leave_inductor_out(monkeypatch)
    torch.set_num_threads(threads)
    decode_problem.model_of.cache_clear()


def measure(*names, more=()):
    item = Item("llama/tiny", WORKLOAD, SHAPE, {"group": "llama"}, "bfloat16", case=DecodeCase)
    peers = [*choose(names, among=IMPLEMENTATIONS), *more]
    wanted = Sweep("decode", "Steps of models", (item,), (*FLOORS[:1], *peers))
    return sweep.run(wanted, KNOBS, backend=Stage(), monitor=Monitor())


def test_the_reference_is_what_a_model_of_float64_computes():
    model = new_model(TINY, 16, torch.device("cpu"), torch.float64)
    draw = torch.Generator().manual_seed(1)
    caches = model.new_cache(2, draw)
    tokens = torch.randint(TINY.vocabulary, (2, 4), generator=draw)
    exact = exact_logits(model, caches, tokens, 9)
    steps = [model(tokens[:, t], torch.full((2,), 9 + t), caches) for t in range(4)]
    torch.testing.assert_close(torch.stack(steps, 1), exact, rtol=1e-12, atol=1e-12)


def test_everybody_computes_the_step(reports):
    results = measure(*STEPS)
    assert taken(reports) > 1
    entries = entries_of(results)
    assert {n: e["status"] for n, e in entries.items()} == dict.fromkeys(entries, "ok")
    for name in STEPS:
        assert entries[name]["check_before"]["passed"] and entries[name]["check_after"]["passed"]
        assert entries[name]["host_us"] is None
    [case] = results["cases"]
    weights = 2 * (64 * (2 + 128 + 64 + 3 * 64)) + 64 * (1 + 128)
    cache = 2 * 2 * 3 * 2 * 16 * 16
    assert case["bytes"] == 2 * (weights + cache + 3 * 128)
    assert entries["eager"]["time_us"]["median"] == 9.0


def test_a_step_with_a_stale_cache_is_wrong():
    def make(problem):
        stale = [c._replace(values=c.values.roll(1, 2)) for c in problem.caches]
        return Launcher(lambda _: (problem.model(problem.tokens, problem.positions, stale),))

    results = measure("eager", more=[Implementation("cutesuper", "ours", make)])
    entry = entries_of(results)["cutesuper"]
    assert entry["status"] == "wrong" and "largest error" in entry["error"]


def test_only_steps_of_models_can_be_decoded():
    [implementation] = choose(["eager-graph"], among=IMPLEMENTATIONS)
    with pytest.raises(ValueError, match="dlrm_mlp: no step of decoding"):
        implementation.make(type("Other", (), {"workload": MEASURED["dlrm_mlp"]}))


@pytest.fixture
def scripted(monkeypatch):
    """The command on the scripted backend at small extents; everybody is PyTorch."""
    for_real = sweep.run

    def run(wanted, settings, **options):
        items = tuple(small(item) for item in wanted.items)
        return for_real(
            replace(wanted, items=items, implementations=(*FLOORS[:1], *map(pytorch, wanted.
                    implementations[1:]))), KNOBS, backend=Stage(), **options,
        )  # fmt: skip

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def small(item):
    if item.case is DecodeCase:
        return replace(item, workload=WORKLOAD, shape=(item.shape[0], *SHAPE[1:]))
    return replace(item, shape=(16, 64, 32))


def pytorch(implementation):
    return replace(implementation, make=choose(["eager"], among=IMPLEMENTATIONS)[0].make)


def test_the_command_fills_both_tables(scripted, tmp_path):
    path, document = tmp_path / "decode.json", tmp_path / "document.md"
    assert decode.main(["--json", str(path)], "") == 0
    results = report.load_results(path)
    assert [c["key"] for c in results["cases"]] == [
        *(f"llama/{b}x4096x32" for b in (1, 8, 32)),
        *(f"llama-1b/{b}x2048x16" for b in (1, 8)), "dlrm/2048x512x256"
    ]  # fmt: skip
    document.write_text("<!-- bench:decode -->\n<!-- /bench:decode -->\n")
    assert report.main(["--page", str(document), str(path)]) == 0
    lines = document.read_text().splitlines()
    assert lines[1] == (
        "cutesuper against the fastest PyTorch column, in 5 cases: 5 wins, 0 ties (within 1 %), "
        "0 losses."
    )
    assert lines[3] == (
        "| model | batch | tokens in the cache | layers | PyTorch eager | SDPA in a CUDA graph "
        '| torch.compile | **torch.compile(backend="cutesuper")** | **cutesuper** | floor '
        "| speedup |"
    )
    # recordings: the floor takes 1 us, then ours twice, then peers; eager is not recorded
    row, _ = [line for line in lines if line.startswith("| tiny | 8 |")]
    cells = row.strip("| ").split(" | ")
    assert cells[:4] == ["tiny", "8", "16", "2"]
    rates = [8e6 / us for us in (9, 4, 5, 3, 2, 1)]
    assert cells[4:10] == [f"{rate:.0f}" for rate in rates] and cells[10] == "1.33x / 2.00x"
    [region] = [line for line in lines if line.startswith("| MLP of DLRM")]
    assert "| 16x64x32 | 4.00 | 5.00 | 6.00 | 3.00 | 2.00 | 1.00 | 1.33x / 2.00x |" in region


def test_losses_and_failures_are_told(scripted, tmp_path):
    path = tmp_path / "decode.json"
    decode.main(["--only", "llama", "--json", str(path)], "")
    results = report.load_results(path)
    first, second, _ = results["cases"]
    for name in ("cutesuper", "cutesuper-backend"):
        entries_of({"cases": [first]})[name]["time_us"]["median"] = 1e9
    entries_of({"cases": [second]})["compile"] |= {
        "time_us": None, "status": "failed", "error": "prepare: no compiler"
    }  # fmt: skip
    text = report.KINDS["decode"].markdown(results)
    assert (
        "in 3 cases: 2 wins, 0 ties (within 1 %), 1 loss; loss: llama/1x4096x32 (0.000x)." in text
    )
    assert "compile: failed: prepare: no compiler" in text
    assert text.count("| failed |") == 1


def test_the_models_are_llamas():
    items = decode.make_sweep(["llama", "llama-1b"], 32, IMPLEMENTATIONS).items
    [weights, cache] = items[0].workload.inputs((8, 4096, 32))
    embedding = LLAMA_3_8B.vocabulary * LLAMA_3_8B.width
    assert weights.dims[0] + embedding == 8_030_261_248  # parameters of Llama-3-8B
    assert cache.size(torch.bfloat16) == 8 * 4096 * 32 * 2 * 8 * 128 * 2
    # of Llama-3.2-1B, whose table is its head too
    assert items[-1].workload.inputs((8, 2048, 16))[0].dims[0] == 1_235_814_400


@pytest.mark.parametrize(
    "arguments", [["--only", "gpt"], ["--layers", "0"], ["--peers", "matmul-alone"]]
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        decode.main(arguments, "")
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
