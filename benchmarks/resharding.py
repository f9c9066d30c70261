"""Resharding: published cases against their bound, planning time, links emulated with real waiting.

    python benchmarks/resharding.py            the whole run, a table
    python benchmarks/resharding.py --quick    within 50 s
    python benchmarks/resharding.py --json     one object
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hetjax.ir.cluster import Cluster
from hetjax.ir.program import Piece, Spec, StageMesh
from hetjax.passes.reshard_plan import (
    lower_bound,
    plan_layouts,
    plan_naive,
    plan_reshard,
    simulate_route,
)
from hetjax.passes.reshard_plan.cases import CASES, bound_of, cluster_of, layouts_of, meshes_of
from hetjax.passes.reshard_plan.layout import layout
from hetjax.passes.reshard_plan.network import network
from hetjax.passes.reshard_plan.routes import gather_scatter, naive
from hetjax.runtime.piece_views import PieceView, carry

Figure = dict[str, Any]


def figure(name: str, value: float, unit: str, target: str, holds: bool) -> Figure:
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": bool(holds)}


def published() -> tuple[list[Figure], list[str]]:
    """Returns figures of the published cases and a table: seconds of each way beside the bound."""
    rows = ["case     way              pieces    bound_s   ours_s   ours/bound  naive_s  gather-scatter_s  bytes exact"]
    worst, exact = 0.0, True
    for case in CASES:
        cluster, source, target = meshes_of(case)
        _, held, wanted = layouts_of(case)
        plan = plan_reshard(cluster, source, case.source_spec, target, case.target_spec, case.shape, case.itemsize)
        bound, ours = bound_of(case), simulate_route(cluster, plan.route, case.itemsize)
        others = [
            simulate_route(cluster, route, case.itemsize).seconds
            for route in (naive(held, wanted), gather_scatter(network(cluster), held, wanted, case.itemsize))]
        into = {w.split(":")[1]: n for w, n in ours.wire_bytes.items() if w.startswith("10gbe") and w.endswith(":in")}
        sources = {cluster.devices[d].node for d in source.devices}
        out = sum(n for w, n in ours.wire_bytes.items() if w.startswith("10gbe") and w.split(":")[1] in sources)
        same = into == bound.into_node and out == bound.crossing
        ratio = ours.seconds / bound.seconds
        worst, exact = max(worst, ratio), exact and same
        rows.append(
            f"{case.name:8} {plan.route.strategy:16} {len(plan.pieces):6} {bound.seconds:10.4f} {ours.seconds:8.4f} "
            f"{ratio:12.4f} {others[0]:8.3f} {others[1]:17.3f}  {same}")
    return [
        figure("published cases, simulated time / bound: worst", worst, "ratio", "<= 1.05", worst <= 1.05),
        figure("published cases, bytes on each link = unique bytes", float(exact), "bool", "1", exact),
    ], rows


def planning() -> list[Figure]:
    """Returns the time of planning one reshard between 64 and 64 devices, layouts not seen before."""
    cluster = cluster_of(16, 8)
    axes = (("x", 8), ("y", 8))
    ends = [StageMesh(f"s{s}", "v100-16g", "room", axes, tuple(range(64 * s, 64 * s + 64))) for s in (0, 1)]
    none: tuple[str, ...] = ()
    specs: dict[str, tuple[Spec, Spec]] = {
        "replicated to replicated": ((none,) * 3, (none,) * 3),
        "64 rows to 64 columns": ((("x", "y"), none, none), (none, ("x", "y"), none)),
        "8 rows to replicated": ((("x",), none, none), (none,) * 3),
        "8 x 8 to 8 x 8 transposed": ((("x",), ("y",), none), (("y",), ("x",), none)),
    }
    out, shape = [], (1024, 1024, 512)
    fresh = layout.__wrapped__
    for name, (a, b) in specs.items():
        times = []
        for _ in range(40):
            start = time.process_time()
            plan_layouts(cluster, fresh(ends[0], a, shape), fresh(ends[1], b, shape), 4)
            times.append(time.process_time() - start)
        median = statistics.median(times) * 1e3
        out.append(figure(f"planning 64 x 64 devices, {name}: median CPU", median, "ms", "< 2", median < 2))
    return out


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


class EmulatedLinks:
    """A transport whose views take as long as the cluster's links say, in real time.

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


def emulated(megabytes: int) -> list[Figure]:
    """Returns seconds through emulated links of a tensor on four devices for four others, against naive and bound."""
    cluster = Cluster.parse(TWO_SITES)
    source, target = (StageMesh(f"s{s}", "box", "ab"[s], (("model", 4),), tuple(range(4 * s, 4 * s + 4))) for s in (0, 1))
    value = np.random.default_rng(0).random((4 * megabytes, 1 << 16), dtype=np.float32)
    none: tuple[str, ...] = ()
    spec: Spec = (none, none)
    held = {d: (block, value) for d, block in source.blocks(spec, value.shape).items()}
    due = target.blocks(spec, value.shape)
    ends = (cluster, source, spec, target, spec, value.shape, 4)

    def run(pieces: tuple[Piece, ...]) -> tuple[float, int]:
        links = EmulatedLinks(cluster)
        start = time.monotonic()
        there = carry("x", pieces, held, due, links, timeout_s=300)
        seconds = time.monotonic() - start
        links.close()
        assert all(np.array_equal(x, value) for x in there.values())
        return seconds, links.bytes["wan:a>b"]

    ours, crossed = run(plan_reshard(*ends).pieces)
    slow, wasted = run(plan_naive(*ends).pieces)
    bound = lower_bound(cluster, layout(source, spec, value.shape), layout(target, spec, value.shape), 4).seconds
    return [
        figure(f"emulated 16 MB/s, {megabytes} MiB on 4 for 4: ours", ours, "s", "", True),
        figure("emulated: naive / ours", slow / ours, "ratio", ">= 3", slow / ours >= 3),
        figure("emulated: ours / bound", ours / bound, "ratio", "<= 1.1", ours <= 1.1 * bound),
        figure("emulated: bytes over the slow link / value's", crossed / value.nbytes, "ratio", "1", crossed == value.nbytes),
        figure("emulated: naive bytes over the slow link / value's", wasted / value.nbytes, "ratio", "", True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    args = parser.parse_args()
    figures, rows = published()
    figures += planning()
    figures += emulated(16 if args.quick else 64)
    not_measured = ["64 MiB through emulated links (16 MiB here)"] if args.quick else []
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    if args.json:
        print(json.dumps({"figures": figures, "machine": machine, "not_measured": not_measured}))
        return
    print("\n".join(rows))
    print()
    for f in figures:
        verdict = "" if not f["target"] else "  holds" if f["holds"] else "  DOES NOT HOLD"
        print(f"{f['name']:70} {f['value']:10.4g} {f['unit']:8} {f['target']:8}{verdict}")
    for line in not_measured:
        print(f"not measured: {line}")
    print(f"machine: {machine}")


if __name__ == "__main__":
    main()
