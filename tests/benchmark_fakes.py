"""A device with a scripted clock, and implementations that run on the CPU, for the benchmarks."""

from __future__ import annotations

import torch

from benchmarks import harness
from benchmarks.harness import Settings
from benchmarks.peers import Implementation, Launcher
from benchmarks.workloads import WORKLOADS

TINY = (4, 64, 32)
PLAIN = WORKLOADS["rmsnorm_linear"]
GAIN = WORKLOADS["rmsnorm_gain_linear"]
KNOBS = Settings(
    rounds=5,
    warm_seconds=0.0,
    host_batches=2,
    host_batch_calls=3,
    memory_bytes=10**6,
    least_sets=4,
    most_sets=8,
)


class FakeRecording:
    def __init__(self, launch, count, keep, label):
        self.launch, self.count, self.label = launch, count, label
        self.kept = {i: tuple(launch(i)) for i in keep}
        self.replays = 0

    def replay(self):
        self.replays += 1
        for i in range(self.count):
            outputs = self.launch(i)
            for memory, value in zip(self.kept.get(i, ()), outputs, strict=False):
                if memory is not value:
                    memory.copy_(value)


class FakeBackend:
    """Runs launches on the CPU and tells scripted times: recording k takes (k + 1) us a launch."""

    device = torch.device("cpu")
    l2_bytes = 10**5
    multiprocessors = 132

    def __init__(self):
        self.orders, self.flushes, self.recordings = [], [], []
        self.broken = False

    def free_bytes(self):
        return 10**9

    def synchronize(self):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def record(self, launch, count, keep):
        self.recordings.append(FakeRecording(launch, count, keep, len(self.recordings)))
        return self.recordings[-1]

    def time_round(self, recordings, flush):
        self.synchronize()
        self.orders.append([r.label for r in recordings])
        self.flushes.append(flush)
        noise = 1.0 + 0.5 * (len(self.orders) == 1)  # the first round is slow
        for recording in recordings:
            recording.replay()
        return [(r.label + 1) * r.count * noise for r in recordings]

    def release(self):
        pass

    def clocks(self):
        return {"sm_mhz": 1980.0}

    def describe(self):
        return {"gpu": "scripted", "multiprocessors": 132, "l2_bytes": self.l2_bytes}


def writer(compute, name="cutesuper", kind="ours", **options):
    """An implementation that writes compute(inputs) into the problem's outputs."""

    def make(problem):
        def launch(i):
            problem.outputs[i][0].copy_(compute(*problem.inputs[i]))
            return problem.outputs[i]

        return Launcher(launch)

    return Implementation(name, kind, make, **options)


def right(x, w):
    return PLAIN.computations["full"].eager(x, w)[0]


def floor_like(name, dependent):
    return Implementation(name, "floor", lambda _: Launcher(lambda i: ()), dependent=dependent)


FLOORS = (floor_like("floor-plain", False), floor_like("floor-pdl", True))


def measure(*peers, backend=None, floors=FLOORS, **options):
    return harness.run(
        PLAIN,
        shapes=[TINY],
        peers=peers,
        floors=floors,
        settings=KNOBS,
        backend=backend or FakeBackend(),
        **options,
    )


def entries_of(results):
    return {entry["name"]: entry for entry in results["cases"][0]["implementations"]}
