"""Sweeps: cases of several workloads in one table, resuming, what hung before, the layers."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from benchmarks import inference, layers, report, sweep
from benchmarks.ahead import Ahead
from benchmarks.harness import DeviceLostError, Monitor
from benchmarks.peers import Implementation, Launcher, choose
from benchmarks.sweep import Item, ResumeError, Sweep, names_of
from benchmarks.workloads import MEASURED
from tests.benchmark_fakes import FLOORS, KNOBS, FakeBackend

SHAPES = {"gated_mlp": (4, 64, 32), "lora": (4, 64, 32, 8), "dlrm_mlp": (4, 64, 32)}
ITEMS = tuple(Item(f"{n}/small", MEASURED[n], s) for n, s in SHAPES.items())


class Clock(FakeBackend):
    """Counts recordings, and with them microseconds, from 1 in every case."""

    def release(self):
        self.recordings.clear()


def eager_like(name, kind="ours"):
    """PyTorch under another name."""

    def make(problem):
        full = problem.workload.computations["full"].eager
        return Launcher(lambda i: full(*problem.inputs[i]))

    return Implementation(name, kind, make)


def small_sweep(*more, items=ITEMS):
    peers = (eager_like("cutesuper"), *choose(["eager", "matmul-alone"]), *more)
    return Sweep("inference", "Inference workloads", items, (*FLOORS, *peers))


def measure(wanted, **options):
    return sweep.run(wanted, KNOBS, backend=Clock(), **options)


def statuses(case):
    return {e["name"]: e["status"] for e in case["implementations"]}


def test_a_sweep_measures_several_workloads_into_one_table():
    results = measure(small_sweep())
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert [case["key"] for case in results["cases"]] == [item.key for item in ITEMS]
    assert [case["title"] for case in results["cases"]] == [i.workload.title for i in ITEMS]
    for case in results["cases"]:
        assert set(statuses(case).values()) == {"ok"}
        assert all(e["time_us"] for e in case["implementations"])
    header, _, *lines = report.KINDS["inference"].markdown(results).splitlines()
    assert header.startswith("| workload | shape | PyTorch eager | cuBLAS products alone | floor")
    assert lines[1] == (
        "| LoRA: X W + (X A) B | 4x64x32x8 | 4.00 | 5.00 | 1.00 / 2.00 | 3.00 | 1.33x |"
    )


def test_only_what_is_missing_is_measured():
    first = measure(small_sweep(items=ITEMS[1:2]))
    marked = copy.deepcopy(first)
    marked["cases"][0]["mark"] = True
    seen = []

    class Watch(Monitor):
        def started(self, results):
            seen.append([case["key"] for case in results["cases"]])

        def case_done(self, results, case):
            seen.append(case["key"])

    results = measure(small_sweep(), earlier=marked, monitor=Watch())
    assert seen == [["lora/small"], "gated_mlp/small", "dlrm_mlp/small"]
    assert [case["key"] for case in results["cases"]] == [item.key for item in ITEMS]
    assert results["cases"][1]["mark"]
    # what was not asked for this time stays
    again = measure(small_sweep(items=ITEMS[:1]), earlier=results)
    assert {case["key"] for case in again["cases"]} == {item.key for item in ITEMS}


def test_a_peer_that_was_not_there_is_a_reason_to_measure_again():
    first = measure(small_sweep(items=ITEMS[:1]))
    results = measure(small_sweep(eager_like("compile", "peer"), items=ITEMS[:1]), earlier=first)
    [case] = results["cases"]
    assert statuses(case)["compile"] == "ok"


def test_an_implementation_that_broke_the_device_is_not_tried_twice():
    attempts = []
    backend = FakeBackend()

    def crash(_):
        attempts.append(None)
        backend.broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    wanted = small_sweep(Implementation("compile", "peer", crash), eager_like("cutesuper-pdl"))
    seen = []

    class Watch(Monitor):
        def started(self, results):
            seen.append(results)

    with pytest.raises(DeviceLostError):
        sweep.run(wanted, KNOBS, backend=backend, monitor=Watch())
    [case] = seen[0]["cases"]
    assert statuses(case)["cutesuper-pdl"] == "pending"
    # compile would break the next cases too
    results = measure(Sweep("inference", "", ITEMS[:1], wanted.implementations), earlier=seen[0])
    [case] = results["cases"]
    assert statuses(case) == dict.fromkeys(statuses(case), "ok") | {"compile": "failed"}
    assert len(attempts) == 1
    text = report.KINDS["inference"].markdown(results)
    assert "compile: failed: prepare: RuntimeError: CUDA error: an illegal memory" in text


def test_results_of_another_version_are_not_completed():
    first = measure(small_sweep(items=ITEMS[:1]))
    first["environment"]["commit"] = "0123"
    with pytest.raises(ResumeError, match="commit 0123, this machine has"):
        measure(small_sweep(), earlier=first)
    with pytest.raises(ResumeError, match="results of layers cannot be completed by inference"):
        measure(small_sweep(), earlier=first | {"kind": "layers", "name": "layers"})


def test_names_are_checked():
    assert names_of(None, ("a", "b"), "--models") == ["a", "b"]
    assert names_of("b", ("a", "b"), "--models") == ["b"]
    with pytest.raises(ValueError, match="--models 'c': one of a, b"):
        names_of("a,c", ("a", "b"), "--models")


# ------------------------------------------------------------------------------------ command lines


@pytest.fixture
def scripted(monkeypatch):
    """The command lines on the scripted backend, which counts its runs; everybody is PyTorch."""
    runs = []

    def run(wanted, settings, **options):
        runs.append(wanted)
        items = tuple(Item(i.key, i.workload, small(i), i.labels) for i in wanted.items)
        peers = tuple(
            eager_like(i.name, i.kind) for i in wanted.implementations if i.kind != "floor"
        )
        tiny = Sweep(wanted.kind, wanted.title, items, (*FLOORS, *peers))
        return run_for_real(tiny, KNOBS, backend=Clock(), **options)

    run_for_real = sweep.run
    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return runs


def small(item):
    return (4, 64, 32, 8)[: len(item.shape)]


def test_inference_writes_one_file_and_completes_another(scripted, tmp_path, capsys):
    first, both = tmp_path / "first.json", tmp_path / "both.json"
    arguments = ["--peers", "cutesuper,eager"]
    assert inference.main(["--workloads", "lora", *arguments, "--json", str(first)], "") == 0
    assert [case["key"] for case in report.load_results(first)["cases"]] == [
        "lora/16x256x4096x16",
        "lora/16x4096x4096x16",
    ]
    arguments += ["--resume", str(first), "--json", str(both)]
    assert inference.main(["--workloads", "dlrm_mlp,lora", *arguments], "") == 0
    keys = [case["key"] for case in report.load_results(both)["cases"]]
    assert keys == ["dlrm_mlp/2048x512x256", "lora/16x256x4096x16", "lora/16x4096x4096x16"]
    assert len(report.load_results(first)["cases"]) == 2
    assert capsys.readouterr().out.count("4x64x32x8 float16") == 2  # measured once


def test_only_results_of_this_table_can_be_resumed(scripted, tmp_path, capsys):
    path = tmp_path / "out.json"
    inference.main(["--workloads", "lora", "--peers", "cutesuper", "--json", str(path)], "")

    def refusal():
        with pytest.raises(SystemExit) as caught:
            layers.main(["--models", "llama3-8b", "--resume", str(path)], "layers")
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert "results of inference cannot be completed by layers" in refusal()
    path.write_text("{")
    assert "not JSON" in refusal()
    path.unlink()
    assert "No such file" in refusal()


def test_layers_can_be_limited(scripted, tmp_path):
    path = tmp_path / "out.json"
    assert layers.main(["--models", "llama3-8b", "--batches", "1,16", "--json", str(path)], "") == 0
    results = report.load_results(path)
    keys = [case["key"] for case in results["cases"]]
    assert keys[:3] == ["llama3-8b/qkv/1", "llama3-8b/qkv/16", "llama3-8b/o/1"]
    assert len(keys) == 8
    wanted = {i.name for i in scripted[0].implementations}
    assert {"cutesuper", "cutesuper-pdl", "eager", "compile", "matmul-alone"} < wanted
    assert "compile-max" not in wanted
    assert {"floor-plain-balanced", "floor-pdl-balanced"} < wanted
    assert {item.dtype for item in scripted[0].items} == {"float16"}


def test_programs_of_layers_are_found_before_the_first_case(scripted, monkeypatch):
    asked = []
    monkeypatch.setattr(Ahead, "prepare", lambda self, items, names: asked.append((items, names)))
    arguments = ["--models", "qwen3-8b", "--batches", "128", "--peers", "cutesuper,matmul-alone"]
    assert layers.main(arguments, "") == 0
    [wanted] = scripted
    wanted.prepare(wanted.items[1:])
    assert asked == [(wanted.items[1:], ["cutesuper", "matmul-alone"])]


def test_a_layer_can_be_in_one_table_in_both_types(scripted):
    arguments = ["--models", "qwen3-8b", "--batches", "8", "--peers", "cutesuper"]
    for dtype in ("float16", "bfloat16"):
        assert layers.main([*arguments, "--dtype", dtype], "") == 0
    [first, *_], [second, *_] = (wanted.items for wanted in scripted)
    assert (first.key, first.dtype) == ("qwen3-8b/qkv/8", "float16")
    assert (second.key, second.dtype) == ("qwen3-8b-bfloat16/qkv/8", "bfloat16")
    assert (first.labels["model"], second.labels["model"]) == ("Qwen3-8B", "Qwen3-8B bfloat16")


@pytest.mark.parametrize(
    "arguments",
    [["--models", "gpt"], ["--batches", "0"], ["--batches", "a"], ["--peers", "x"],
     ["--rounds", "0"], ["--skip", "x"], ["--dtype", "float32"]],
)  # fmt: skip
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        layers.main(arguments, "layers")
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_layers_have_the_extents_of_the_models():
    def shapes(model):
        return [layers.MODELS[model].layer(name, 8)[1] for name in layers.LAYERS]

    assert shapes("llama3-8b") == [
        (8, 4096, 6144), (8, 4096, 4096), (8, 4096, 14336), (8, 14336, 4096)
    ]  # fmt: skip
    assert shapes("llama3-70b") == [
        (8, 8192, 10240), (8, 8192, 8192), (8, 8192, 28672), (8, 28672, 8192)
    ]  # fmt: skip
    assert shapes("qwen2.5-7b") == [
        (8, 3584, 4608), (8, 3584, 3584), (8, 3584, 18944), (8, 18944, 3584)
    ]  # fmt: skip
    assert shapes("qwen3-8b") == [
        (8, 4096, 6144), (8, 4096, 4096), (8, 4096, 12288), (8, 12288, 4096)
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- tables


@pytest.fixture
def of_models(scripted, tmp_path):
    """Results of two runs, a model each."""
    loaded = []
    for model in ("llama3-8b", "qwen2.5-7b"):
        path = tmp_path / f"{model}.json"
        layers.main(["--models", model, "--batches", "8", "--json", str(path)], "layers")
        loaded.append(report.load_results(path))
    return loaded


def test_several_files_make_one_table(of_models, tmp_path):
    of_models[1]["environment"]["date"] = "another day"
    paths = []
    for i, results in enumerate(of_models):
        paths.append(str(tmp_path / f"{i}.json"))
        report.save_results(results, tmp_path / f"{i}.json")
    document = tmp_path / "performance.md"
    document.write_text("a\n<!-- bench:layers -->\n<!-- /bench:layers -->\nz\n")
    assert report.main(["--page", str(document), *paths, paths[0]]) == 0
    text = document.read_text()
    assert text.count("**Llama-3-8B**") == text.count("**Qwen2.5-7B**") == 1
    # recordings: two floors, cutesuper, cutesuper-pdl, eager, compile, matmul-alone
    times = "5.00 | 6.00 | 7.00 | 1.00 / 2.00 | 3.00 | 4.00 | 1.67x / 1.25x"
    assert text.count(f"| gate_up | 8 | 64 x 32 | {times} |") == 2
    assert "fastest PyTorch column, in 8 cases: 8 wins, 0 ties (within 1 %), 0 losses." in text
    assert "another day" in text.splitlines()[-3]
    assert "Failures" not in text


def test_losses_and_failures_stand_above_the_tables(of_models):
    results = of_models[0]
    first, second, *_ = results["cases"]
    entries = {e["name"]: e for e in first["implementations"]}
    entries["cutesuper"]["time_us"]["median"] = 10.0
    other = {e["name"]: e for e in second["implementations"]}
    other["cutesuper"] |= {"time_us": None, "status": "failed", "error": "prepare: no program"}
    text = report.KINDS["layers"].markdown(results)
    assert (
        "in 4 cases: 2 wins, 0 ties (within 1 %), 1 loss; loss: Llama-3-8B qkv 8 (0.500x)." in text
    )
    assert "* Llama-3-8B o 8, cutesuper: failed: prepare: no program" in text
    assert " | 7.00 | 1.00 / 2.00 | failed | 4.00 | - / 1.25x |" in text


def test_many_rows_are_held_against_the_products_alone(of_models):
    results = of_models[0]
    assert "products alone, in the median" not in report.KINDS["layers"].markdown(results)
    # qkv with 64 rows does not count, nor does down, whose products failed
    ours = {"qkv": 50.0, "o": 7.7, "gate_up": 7.0, "down": 70.0}
    for case in results["cases"]:
        case["batch"] = 64 if case["layer"] == "qkv" else 256
        entries = {e["name"]: e for e in case["implementations"]}
        entries["cutesuper"]["time_us"]["median"] = ours[case["layer"]]
        if case["layer"] == "down":
            entries["matmul-alone"] |= {"time_us": None, "status": "failed", "error": "no memory"}
    lines = report.KINDS["layers"].markdown(results).splitlines()
    [place] = [i for i, line in enumerate(lines) if line.startswith("From a batch of 65 rows on")]
    assert lines[place] == (
        "From a batch of 65 rows on, cutesuper, launched like the others, takes for a whole layer, "
        "norms, residuals and gates included, 1.05x the time of cuBLAS for the layer's matrix "
        "products alone, in the median of 2 cases, and 1.10x at worst (Llama-3-8B o 256); it takes "
        "no longer than these products in 1 of 2."
    )
    assert lines[place - 2].startswith("cutesuper, launched like the others, against the fastest")
    assert lines[place + 2] == "Failures:"
