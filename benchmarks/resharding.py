"""Resharding: published cases against their bound, planning, links with real waiting, a step end to end.

    python benchmarks/resharding.py            the whole run, about ten minutes
    python benchmarks/resharding.py --quick    within 50 s
    python benchmarks/resharding.py --json     one object
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _report import Figure, Report, main

from hetjax.ir.cluster import Cluster
from hetjax.ir.program import Piece, Reshard, Spec, StageMesh, Task
from hetjax.passes.reshard_plan import (
    lower_bound,
    plan_layouts,
    plan_naive,
    plan_reshard,
    price_pieces,
    simulate_route,
)
from hetjax.passes.reshard_plan.cases import CASES, bound_of, cluster_of, layouts_of, meshes_of
from hetjax.passes.reshard_plan.layout import layout
from hetjax.passes.reshard_plan.network import network
from hetjax.passes.reshard_plan.routes import gather_scatter, naive
from hetjax.passes.simulator_program import transfer_of
from hetjax.runtime.piece_views import PieceView, carry

ROOT = pathlib.Path(__file__).resolve().parents[1]
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "32", "JAX_PLATFORMS": "cpu"}
NONE: tuple[str, ...] = ()


def at_most(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, float(value), unit, f"<= {bound:g}", bool(value <= bound))


def exactly(name: str, value: float, unit: str, target: float) -> Figure:
    return Figure(name, float(value), unit, f"= {target:g}", bool(value == target))


def at_least(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, float(value), unit, f">= {bound:g}", bool(value >= bound))


# ---------------------------------------------------------------------------- planned


def published() -> list[Figure]:
    """Simulated seconds of the published cases beside the bound, the per-replica send and gather-scatter."""
    out: list[Figure] = []
    for case in CASES:
        cluster, source, target = meshes_of(case)
        _, held, wanted = layouts_of(case)
        plan = plan_reshard(cluster, source, case.source_spec, target, case.target_spec, case.shape, case.itemsize)
        bound, ours = bound_of(case), simulate_route(cluster, plan.route, case.itemsize)
        ways = {
            "per-replica send": naive(held, wanted),
            "gather-scatter": gather_scatter(network(cluster), held, wanted, case.itemsize),
        }
        into = {w.split(":")[1]: n for w, n in ours.wire_bytes.items() if w.startswith("10gbe") and w.endswith(":in")}
        sources = {cluster.devices[d].node for d in source.devices}
        sent = sum(n for w, n in ours.wire_bytes.items() if w.startswith("10gbe") and w.split(":")[1] in sources)
        extra = sum(abs(into.get(n, 0) - bound.into_node.get(n, 0)) for n in {*into, *bound.into_node})
        extra += abs(sent - bound.crossing)
        out += [
            Figure(f"{case.name}: bound", float(bound.seconds), "s"),
            at_most(f"{case.name}: {plan.route.strategy}, {len(plan.pieces)} pieces / bound", ours.seconds / bound.seconds, "", 1.05),
            exactly(f"{case.name}: bytes on the links beside the unique bytes", extra, "bytes", 0),
            *(Figure(f"{case.name}: {name} / bound", simulate_route(cluster, way, case.itemsize).seconds / bound.seconds, "")
              for name, way in ways.items()),
        ]
    return out


def planning(repeats: int) -> list[Figure]:
    """CPU time of planning one reshard between 64 and 64 devices, layouts not seen before."""
    cluster = cluster_of(16, 8)
    axes = (("x", 8), ("y", 8))
    ends = [StageMesh(f"s{s}", "v100-16g", "room", axes, tuple(range(64 * s, 64 * s + 64))) for s in (0, 1)]
    specs: dict[str, tuple[Spec, Spec]] = {
        "replicated to replicated": ((NONE,) * 3, (NONE,) * 3),
        "64 rows to 64 columns": ((("x", "y"), NONE, NONE), (NONE, ("x", "y"), NONE)),
        "8 rows to replicated": ((("x",), NONE, NONE), (NONE,) * 3),
        "8 x 8 to 8 x 8 transposed": ((("x",), ("y",), NONE), (("y",), ("x",), NONE)),
    }
    out, shape = [], (1024, 1024, 512)
    fresh = layout.__wrapped__
    for name, (a, b) in specs.items():
        times = []
        for _ in range(repeats):
            start = time.process_time()
            plan_layouts(cluster, fresh(ends[0], a, shape), fresh(ends[1], b, shape), 4)
            times.append(time.process_time() - start)
        figure = at_most(f"planning 64 x 64 devices, {name}: median CPU", statistics.median(times) * 1e3, "ms", 2)
        out.append(figure)
    return out


# ---------------------------------------------------------------------------- links with real waiting

TWO_SITES = """
name = "two sites"
[[sites]]
name = "a"
[[sites.nodes]]
kind = "box"
devices = 4
link = "inside"
[[sites]]
name = "b"
[[sites.nodes]]
kind = "box"
devices = 4
link = "inside"
[links.inside]
bandwidth_gb_s = 1
latency_us = 10
[links.wan]
between = ["a", "b"]
bandwidth_bytes_s = 16_000_000
latency_ms = 2
[kinds.box]
like = "cpu"
"""
WAN = "wan:a>b"


class WaitingLinks:
    """A transport of host views that lets each chunk take as long as the cluster's links say, in real time.

    A view waits until both its wires are free, holds them for its bytes over their bandwidth, and arrives
    a latency later; one thread sleeps until the next arrival.
    """

    def __init__(self, cluster: Cluster):
        self.network = network(cluster)
        self.free: dict[int, float] = {}
        self.bytes: dict[str, int] = {}
        self.queue: list[tuple[float, int, PieceView, Callable[[PieceView], None]]] = []
        self.count, self.over, self.changed = itertools.count(), False, threading.Condition()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def send(self, view: PieceView, arrived: Callable[[PieceView], None]) -> None:
        priced = self.network.price(np.array([view.source]), np.array([view.target]), np.array([view.nbytes]))
        wires = set(priced.wires[0].tolist())
        with self.changed:
            start = max([time.monotonic(), *(self.free.get(w, 0.0) for w in wires)])
            end = start + float(priced.seconds[0])
            for w in wires:
                self.free[w] = end
                name = self.network.names[w]
                self.bytes[name] = self.bytes.get(name, 0) + view.nbytes
            heapq.heappush(self.queue, (end + float(priced.latency_s[0]), next(self.count), view, arrived))
            self.changed.notify()

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.over and (not self.queue or self.queue[0][0] > time.monotonic()):
                    self.changed.wait(self.queue[0][0] - time.monotonic() if self.queue else None)
                if self.over:
                    return
                _, _, view, arrived = heapq.heappop(self.queue)
            arrived(view)

    def close(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify()
        self.thread.join()


def _two_sites() -> tuple[Cluster, list[StageMesh]]:
    meshes = [StageMesh(f"s{s}", "box", "ab"[s], (("model", 4),), tuple(range(4 * s, 4 * s + 4))) for s in (0, 1)]
    return Cluster.parse(TWO_SITES), meshes


def _waited(what: str, ours: tuple[float, int], theirs: tuple[float, int], bound_s: float, nbytes: int) -> list[Figure]:
    return [
        Figure(f"{what}: bound", float(bound_s), "s"), Figure(f"{what}: ours", ours[0], "s"),
        Figure(f"{what}: per-replica send", theirs[0], "s"),
        at_least(f"{what}: per-replica send / ours", theirs[0] / ours[0], "", 3),
        at_most(f"{what}: ours / bound", ours[0] / bound_s, "", 1.1),
        exactly(f"{what}: bytes over the slow link / the value's", ours[1] / nbytes, "", 1),
        Figure(f"{what}: the same of the per-replica send", theirs[1] / nbytes, ""),
    ]


def waiting_views(mebibytes: int) -> list[Figure]:
    """Host views, chunk by chunk: a value on four devices for four others over 16 MB/s."""
    cluster, (source, target) = _two_sites()
    value = np.random.default_rng(0).random((4 * mebibytes, 1 << 16), dtype=np.float32)
    spec: Spec = (NONE, NONE)
    held = {d: (block, value) for d, block in source.blocks(spec, value.shape).items()}
    due = target.blocks(spec, value.shape)
    ends = (cluster, source, spec, target, spec, value.shape, 4)

    def run(pieces: Sequence[Piece]) -> tuple[float, int]:
        links = WaitingLinks(cluster)
        start = time.monotonic()
        there = carry("x", pieces, held, due, links, timeout_s=300)
        seconds = time.monotonic() - start
        links.close()
        assert all(np.array_equal(x, value) for x in there.values())
        return seconds, links.bytes[WAN]

    bound = lower_bound(cluster, layout(source, spec, value.shape), layout(target, spec, value.shape), 4).seconds
    ours, theirs = run(plan_reshard(*ends).pieces), run(plan_naive(*ends).pieces)
    return _waited(f"{mebibytes} MiB as host views", ours, theirs, bound, value.nbytes)


def arm_arrays(mebibytes: int) -> None:
    """JAX arrays through the link emulator of the schedules: what a lane posts, until it is there and ready."""
    import jax

    from hetjax.ir.graph import Aval
    from hetjax.runtime.instructions import Move
    from hetjax.runtime.links import EmulatedLinks, Parcel
    from hetjax.runtime.meshes import jax_mesh, named_sharding
    from hetjax.runtime.resharding import make_move

    cluster, (source, target) = _two_sites()
    shape, spec = (4 * mebibytes, 1 << 16), (NONE, NONE)
    meshes = [jax_mesh(m, jax.devices()) for m in (source, target)]
    value = jax.device_put(np.random.default_rng(0).random(shape, dtype=np.float32), named_sharding(meshes[0], spec))
    ends = (cluster, source, spec, target, spec, shape, 4)
    own = source.blocks(spec, shape)

    def run(pieces: tuple[Piece, ...]) -> tuple[float, int]:
        reshard = Reshard("x", 0, "micro", 0, 1, spec, spec, value.nbytes, pieces)
        carried = make_move(reshard, Aval("f32", shape), source, target, meshes[1], dict(enumerate(jax.devices())))
        assert carried is not None
        jax.block_until_ready(carried(value))  # compiles
        carried.bytes_sent.clear()
        links = EmulatedLinks({"x": transfer_of("x", *price_pieces(cluster, pieces, own, 4))})
        there, arrived = [], threading.Event()

        def deliver(move: Move, arrays: Sequence[Any], *_: float) -> None:
            there.extend(arrays)
            arrived.set()

        def fail(move: Move, error: Exception) -> None:
            there.append(error)
            arrived.set()

        move = Move([Task("send", 0, 0, "x")], [0], [0], lambda arrays: [carried.bring(arrays[0])], value.nbytes)
        start = time.perf_counter()
        links.post(Parcel(move, [value], start, deliver, fail), 0)
        arrived.wait()
        got = jax.block_until_ready(carried.complete(there[0]))
        seconds = time.perf_counter() - start
        links.close()
        assert all(np.array_equal(shard.data, np.asarray(value)) for shard in got.addressable_shards)
        crossed = sum(n for (a, b), n in carried.bytes_sent.items() if a in source.devices and b in target.devices)
        return seconds, crossed

    bound = lower_bound(cluster, layout(source, spec, shape), layout(target, spec, shape), 4).seconds
    ours, theirs = run(plan_reshard(*ends).pieces), run(plan_naive(*ends).pieces)
    figures = _waited(f"{mebibytes} MiB as arrays, emulated links", ours, theirs, bound, value.nbytes)
    print(json.dumps([vars(f) for f in figures]))


# ---------------------------------------------------------------------------- executed

STEP_SITES = TWO_SITES.replace("devices = 4\nlink = \"inside\"\n[links", "devices = 2\nlink = \"inside\"\n[links").replace(
    "bandwidth_bytes_s = 16_000_000\nlatency_ms = 2", "bandwidth_gbit_s = 10\nlatency_ms = 2")


def arm_step(steps: int) -> None:
    """The demo's model, tensor parallel over four devices here and two there."""
    import jax
    import optax

    import hetjax
    from hetjax.demo import session, training
    from hetjax.demo.text import batches, load_corpus
    from hetjax.frontend.parity import Case, side_by_side
    from hetjax.frontend.rehearsal import cluster_emulation
    from hetjax.passes.simulator_program import simulate_program

    corpus = load_corpus()
    config = training.Config(corpus.vocab_size)
    gpt, micro = session.model_of("linen"), session.NUM_MICROBATCHES
    fresh = session.fresh_states("linen", config, optax.sgd(0.1))
    cluster = Cluster.parse(STEP_SITES)
    options: dict[str, Any] = {"cluster": cluster, "num_stages": 2, "num_microbatches": micro, "mesh": "1,4;1,2"}
    parallel = hetjax.parallelize(gpt.train_step, **options)
    stream = batches(corpus.train, session.BATCH_SIZE, config.length, seed=2)
    case = Case(gpt.train_step, fresh(), stream, {"framework": "linen"})
    compared = list(side_by_side(case, parallel, steps))
    entry = parallel._latest
    assert entry is not None
    program, stats = entry.program, parallel.stats()
    activation = session.BATCH_SIZE // micro * config.length * config.width * 4
    near = {0, 1, 2, 3}
    crossing = {(0, 1): 0, (1, 0): 0}
    for r in program.reshards:
        if r.form == "micro":
            for p in r.pieces:
                if (p.source in near) != (p.target in near):
                    size = r.nbytes / int(np.prod(program.micro_avals[r.ref].shape))
                    crossing[r.source, r.target] += round(size * int(np.prod(np.subtract(p.stop, p.start))))
    others = sum(r.nbytes for r in program.reshards if r.form != "micro")
    timed = hetjax.parallelize(gpt.train_step, plan=parallel.plan, **options, rehearse="timed")
    state, batch = fresh(), next(batches(corpus.train, session.BATCH_SIZE, config.length, seed=2))
    state, _ = timed(state, batch)
    for _ in range(2):
        state, _ = jax.block_until_ready(timed(state, batch))
    emulation = cluster_emulation(cluster, program)
    predicted = simulate_program(program, cluster, emulation.work_s)
    seen = timed.stats()
    figures = [
        exactly("demo, tp 4 to tp 2: leaves unequal to plain jit", sum(not d.ok for s in compared for d in s.differences), "", 0),
        exactly("demo: bytes forward over the slow link, a microbatch / an activation", crossing[0, 1] / activation, "", 1),
        exactly("demo: bytes back over the slow link, a microbatch / an activation", crossing[1, 0] / activation, "", 1),
        exactly("demo: bytes counted between stages, a step, beside those planned",
                stats["bytes_between_stages"] - micro * sum(crossing.values()) - others, "bytes", 0),
        Figure("demo: bytes that cross once a step (sums, metrics)", float(others), "bytes"),
        Figure("demo, emulated: a step", seen["measured_step_s"] * 1e3, "ms"),
        at_most("demo, emulated: a step / simulated", seen["measured_step_s"] / predicted.makespan_s, "", 1.1),
    ]
    print(json.dumps([vars(f) for f in figures]))


def subprocess_figures(arm: str, size: int) -> list[Figure]:
    env = os.environ | EIGHT | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, __file__, "--arm", arm, str(size)], capture_output=True, text=True, env=env, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{arm} failed:\n{done.stderr}")
    return [Figure(**f) for f in json.loads(done.stdout.splitlines()[-1])]


def random_pairs() -> list[Figure]:
    """The longer search of the tests: 2,000 random (mesh, spec, shape, dtype) pairs, executed on eight devices."""
    test = "tests/runtime/test_resharding.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "nightly", test], capture_output=True, text=True, cwd=ROOT)
    tail = done.stdout.strip().splitlines()[-1:]
    passed = int((re.search(r"(\d+) passed", " ".join(tail)) or [0, 0])[1])
    return [exactly("executed random pairs: identical, bytes as planned (250 a part, 8 parts)", passed, "parts", 8)]


def run(report: Report) -> None:
    quick = report.quick
    report.measure("published cases", 3, published)
    report.measure("planning", 1, lambda: planning(10 if quick else 40))
    size = 4 if quick else 64
    report.measure("host views through waiting links", 2, lambda: waiting_views(size))
    report.measure("arrays through emulated links", 8, lambda: subprocess_figures("arrays", size))
    report.measure("the demo's step, tp 4 to tp 2", 35, lambda: subprocess_figures("step", 3))
    report.measure("2,000 executed random pairs", 300, random_pairs)
    if quick:
        report.not_measured.append("64 MiB through links (4 MiB here)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        {"arrays": arm_arrays, "step": arm_step}[sys.argv[2]](int(sys.argv[3]))
    else:
        main(__doc__ or "", run)
