"""Plans and code of the floor kernel; no GPU is needed for either."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOOR = """
import json
from pathlib import Path
from benchmarks.floor import StreamKernel, compile_stream, stream_plan
facts = []
for size in (48, 4096, 300_000, 33_700_008, 10**9):
    for balanced in (False, True):
        p = stream_plan(size, 132, balanced=balanced)
        facts.append(dict(size=p.size, blocks=p.blocks, chunk=p.chunk, stages=p.stages,
                          chunks=p.chunks, tail=p.tail, asked=size))
try:
    stream_plan(15, 132, balanced=False)
    raise SystemExit("accepted 15 bytes")
except ValueError:
    pass
builds = {}
for name, dependent, checksum in (("plain", 0, 0), ("pdl", 1, 0), ("checksum", 1, 1)):
    Path(name).mkdir()
    kernel = StreamKernel(stream_plan(33_700_000, 132, balanced=True),
                          dependent=bool(dependent), checksum=bool(checksum))
    compiled = compile_stream(kernel, f"--keep-ptx --keep-cubin --dump-dir {name}")
    ptx = compiled.artifacts.PTX
    Path(name, "kernel.cubin").write_bytes(compiled.artifacts.CUBIN)
    builds[name] = ptx if isinstance(ptx, str) else ptx.decode()
print("FACTS" + json.dumps([facts, builds]))
"""


@pytest.fixture(scope="module")
def floor_facts(tmp_path_factory):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    where = tmp_path_factory.mktemp("floor")
    environment = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FLOOR],
        check=False,
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plans, builds = json.loads(done.stdout.split("FACTS")[1])
    return plans, builds, where


def test_floor_plans_cover_every_byte_once(floor_facts):
    for plan in floor_facts[0]:
        size, chunk = plan["size"], plan["chunk"]
        assert 0 <= plan["asked"] - size < 16
        assert (plan["chunks"] - 1) * chunk + plan["tail"] == size
        assert 0 < plan["tail"] <= chunk
        assert chunk % 128 == 0
        assert plan["tail"] % 16 == 0
        assert plan["blocks"] <= min(132, plan["chunks"])
        assert plan["stages"] >= 1
        assert plan["stages"] * chunk <= 160 * 1024


def test_balanced_floor_uses_every_multiprocessor_evenly(floor_facts):
    balanced = {plan["asked"]: plan for plan in floor_facts[0][1::2]}
    for size in (300_000, 33_700_008, 10**9):
        plan = balanced[size]
        rounds = math.ceil(plan["chunks"] / 132)
        # what the busiest block reads, over its fair share
        assert rounds * plan["chunk"] / (size / 132) < 1 + 128 / plan["chunk"]
        assert plan["blocks"] == 132


def test_floor_kernel_streams_by_bulk_copy(floor_facts):
    builds = floor_facts[1]
    bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    for ptx in builds.values():
        assert ".target sm_90a" in ptx
        assert bulk in ptx
        assert "mbarrier.try_wait.parity" in ptx
        assert ".local" not in ptx
    assert "ld.shared" not in builds["plain"]
    assert "ld.shared" in builds["checksum"]
    assert "st.global" in builds["checksum"]
    assert "griddepcontrol" not in builds["plain"]


def test_dependent_floor_loads_before_it_waits(floor_facts):
    ptx = floor_facts[1]["pdl"]
    launch = ptx.index("griddepcontrol.launch_dependents")
    wait = ptx.index("griddepcontrol.wait")
    assert launch < ptx.index("cp.async.bulk") < ptx.rindex("cp.async.bulk") < wait


def frame_bytes(cubin: bytes) -> list[int]:
    """Stack frames in a cubin: attribute 0x11 of .nv.info holds (symbol, bytes) pairs."""
    table = int.from_bytes(cubin[40:48], "little")
    size, count, names_at = (int.from_bytes(cubin[i : i + 2], "little") for i in (58, 60, 62))

    def section(i):
        header = cubin[table + i * size : table + (i + 1) * size]
        return [int.from_bytes(header[a:b], "little") for a, b in ((0, 4), (24, 32), (32, 40))]

    names = section(names_at)[1]
    frames = []
    for name, offset, length in map(section, range(count)):
        label = cubin[names + name : cubin.index(b"\0", names + name)]
        position = offset if label == b".nv.info" else offset + length
        while position < offset + length:
            kind, attribute = cubin[position], cubin[position + 1]
            value = int.from_bytes(cubin[position + 2 : position + 4], "little")
            if attribute == 0x11:
                frames.append(int.from_bytes(cubin[position + 8 : position + 12], "little"))
            position += 4 + (value if kind == 4 else 0)
    return frames


def test_floor_kernel_spills_nothing(floor_facts):
    for name in ("plain", "pdl", "checksum"):
        frames = frame_bytes((floor_facts[2] / name / "kernel.cubin").read_bytes())
        assert frames == [0], name
