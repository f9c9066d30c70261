"""In-memory checkpoints: encoding, saves and restores, beside orbax and memcpy of the same run.

    python benchmarks/eccheck.py            1 GiB of state, four agents: some minutes, 9 GiB of memory
    python benchmarks/eccheck.py --quick    within 50 s
    python benchmarks/eccheck.py --json     one object

Arms: orbax to disk (restored with the files dropped from the page cache, as after the loss of a host,
and once more from the cache), orbax to /dev/shm, 2+2 (any two of four agents may be lost), 3+1 (any one), and
two copies, the last three through agents on the loopback device. One trainer, eight CPU devices. What is
compared is measured in turns, so that other work on the machine meets all alike; medians. memcpy is
one thread between buffers that were touched before, and counts both sides where bytes touched do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import _eccheck_waste as waste

Figure = dict[str, Any]
MIB = 1 << 20


figure = waste.figure


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turns(rounds: int, **runs: Callable[[], Any]) -> dict[str, list[float]]:
    """Returns the seconds of each run in each round, the runs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return times


# -- the code ----------------------------------------------------------------------------------------


def encode_figures(sizes_mib: list[int], rounds: int) -> Iterator[Figure]:
    for mib in sizes_mib:
        source = np.random.default_rng(0).integers(0, 256, mib * MIB, np.uint8)
        target = np.ones_like(source)
        for k, m in ((2, 2), (4, 2), (8, 2), (8, 4)):
            yield from _encode_figures(source, target, k, m, rounds)
        yield from _swar_figures(source)


def _encode_figures(
    source: np.ndarray, target: np.ndarray, k: int, m: int, rounds: int
) -> Iterator[Figure]:
    from hetjax.kernels.erasure import Code, isal
    from hetjax.kernels.erasure.code import default_threads

    backend = "isal" if isal.library() is not None else "swar"
    code, total = Code(k, m), source.nbytes
    length = total // k
    data = [source[i * length : (i + 1) * length] for i in range(k)]
    parity = [np.ones(length, np.uint8) for _ in range(m)]
    lost = list(range(min(m, k)))
    out = {i: np.ones(length, np.uint8) for i in lost}
    have = {i: c for i, c in enumerate([*data, *parity]) if i not in lost}
    threaded = f"{default_threads()} threads"
    runs: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: np.copyto(target, source),
        "1 thread": lambda: code.encode(data, parity, backend=backend),
        threaded: lambda: code.encode(data, parity, backend=backend, threads=0),
        "rebuild": lambda: code.reconstruct(have, out, backend=backend, threads=0),
    }
    for run in runs.values():
        run()
    times = {name: min(t) for name, t in in_turns(rounds, **runs).items()}
    touched = {"memcpy": 2 * total, "1 thread": total + length * m, threaded: total + length * m,
               "rebuild": length * (k + len(lost))}
    rates = {name: touched[name] / times[name] / 1e9 for name in times}
    label = f"{k}+{m}, {total // MIB} MiB"
    for name, rate in rates.items():
        title = f"memcpy beside {label}" if name == "memcpy" else f"{backend} {label}, {name}"
        yield figure(f"{title}, bytes touched", rate, "GB/s")
    ratio = max(rates["1 thread"], rates[threaded]) / rates["memcpy"]
    bound = (k, m) != (2, 2)
    yield figure(f"encode {label} over memcpy", ratio, "x", ">= 0.6" if bound else "",
                 ratio >= 0.6 or not bound)


def _swar_figures(source: np.ndarray) -> Iterator[Figure]:
    import jax

    from hetjax.kernels.erasure import swar
    from hetjax.kernels.erasure.field import generator

    k, m = 8, 2
    words = [jax.device_put(w) for w in source.view(np.uint32).reshape(k, -1)]
    rows = generator(k, m)[k:]
    run = lambda: jax.block_until_ready(swar.combine_words(rows, words))  # noqa: E731
    run()
    rate = source.nbytes * (1 + m / k) / min(seconds(run) for _ in range(3)) / 1e9
    yield figure(f"jitted JAX {k}+{m}, {source.nbytes // MIB} MiB, bytes touched", rate, "GB/s")


def drop_pages(folder: str) -> None:
    """Drops the files of a folder from the page cache, so that they are read from the disk."""
    os.sync()
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- agents ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def agents(count: int, memory_bytes: int) -> Iterator[tuple[list[subprocess.Popen], list[str], str]]:
    """Starts agents; yields processes, addresses and the first one's socket."""
    folder = tempfile.mkdtemp(prefix="ecb")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "hetjax", "agent", "--listen", "127.0.0.1:0", "--json", "--memory",
             str(memory_bytes), "--scrub-interval", "0", "--socket", f"{folder}/{i}"],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
            cwd=pathlib.Path(__file__).resolve().parents[1],
        )
        for i in range(count)
    ]
    try:
        hellos = [json.loads(p.stdout.readline()) for p in processes if p.stdout]
        yield processes, [h["address"] for h in hellos], f"{folder}/0"
    finally:
        for process in processes:
            kill(process)
        shutil.rmtree(folder, ignore_errors=True)


def kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout:
        process.stdout.close()


def transport_rate(client: Any, found: Any, home: str) -> float:
    """Returns the rate of reading an object's remote data chunks and dropping them, bytes/s."""
    from hetjax.eccheck.layout import place

    layout = found.manifest.layouts[0]
    runs_of = {}
    for (_, position), address in found.holders.items():
        runs = [[j, 0, place(layout).used_blocks[position][j]] for j in layout.data_stripes(position)]
        if address != home:
            runs_of[address] = [r for r in runs if r[2]]
    total = sum(n for runs in runs_of.values() for _, _, n in runs) * layout.block_bytes

    def drop(address: str) -> None:
        for _ in client.pool.peer(address).read_blocks(
            found.oid, runs_of[address], layout.block_bytes, timeout_s=300
        ):
            pass

    return total / seconds(lambda: client.pool.each(list(runs_of), drop))


def arm_figures(state_mib: int, rounds: int) -> Iterator[Figure]:
    import jax
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from hetjax.eccheck import Config, handler_registry
    from hetjax.eccheck.layout import sent_bytes
    from hetjax.eccheck.tier import tier_of
    from hetjax.eccheck.trees import empty_aligned

    full = state_mib >= 1024  # the targets are for a state of this size

    def bound(target: str, holds: bool) -> tuple[str, bool]:
        return (target, holds) if full else ("", True)

    mesh = Mesh(np.array(jax.devices()), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    rows, leaves = 1024, 8
    each = state_mib * MIB // leaves
    draw = np.random.default_rng(0)
    state = {
        f"w{i}": jax.device_put(
            draw.integers(0, 256, each, np.uint8).view(np.uint32).reshape(rows, -1), sharding)
        for i in range(leaves)
    }
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    nbytes = sum(x.nbytes for x in state.values())
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    folders = {"orbax disk": tempfile.mkdtemp(prefix="ecb"),
               "orbax /dev/shm": tempfile.mkdtemp(prefix="ecb", dir="/dev/shm"),
               "2+2": tempfile.mkdtemp(prefix="ecb"), "3+1": tempfile.mkdtemp(prefix="ecb")}
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with contextlib.ExitStack() as stack:
        for folder in folders.values():
            stack.callback(shutil.rmtree, folder, True)
        # Two versions at 2+2 and one at 3+1 over four agents; half of that, as the agent takes two.
        share = (2 * 2 + 4 / 3) / 4
        processes, addresses, socket = stack.enter_context(agents(4, int(nbytes * share * 1.03) // 2 + MIB))
        config = Config(agents=tuple(addresses), socket=socket, k=2, m=2)
        registries = {"orbax disk": None, "orbax /dev/shm": None, "2+2": handler_registry(config),
                      "3+1": handler_registry(Config(agents=tuple(addresses), socket=socket, k=3, m=1))}
        managers = {
            name: stack.enter_context(ocp.CheckpointManager(
                folders[name], options=options, handler_registry=registry))
            for name, registry in registries.items()
        }
        client = tier_of(config).client
        client.local()
        blocked: dict[str, list[float]] = {name: [] for name in managers}
        total: dict[str, list[float]] = {name: [] for name in managers}
        copy: list[float] = []
        step = 0

        def save(name: str) -> None:
            manager = managers[name]
            start = time.perf_counter()
            manager.save(step, args=ocp.args.StandardSave(state))
            blocked[name].append(time.perf_counter() - start)
            manager.wait_until_finished()
            total[name].append(time.perf_counter() - start)

        def restore(name: str) -> None:
            out = managers[name].restore(step, args=ocp.args.StandardRestore(abstract))
            jax.block_until_ready(out)
            results[name] = out

        def drop(*names: str) -> None:
            oids = [f.oid for f in tier_of(config).survey().found if f.name.split("-")[0] in names]
            for address in addresses:
                client.pool.peer(address).call("drop", oids=oids, timeout_s=10)

        def coded() -> Any:
            return next(f for f in tier_of(config).survey().found if f.manifest.layouts[0].k == 2)

        results: dict[str, Any] = {}
        for step in range(rounds + 1):  # noqa: B007  (save and restore read it)
            copy.append(seconds(lambda: np.copyto(target, source)))
            for name in managers:
                save(name)
            drop(os.path.basename(folders["3+1"]))
        for values in (*blocked.values(), *total.values(), copy):
            del values[:1]  # the first round warms up
        memcpy_s = statistics.median(copy)
        yield figure(f"memcpy of the state ({state_mib} MiB)", memcpy_s, "s")
        block = {n: statistics.median(b) for n, b in blocked.items() if b}
        saves = {n: statistics.median(t) for n, t in total.items() if t}
        for name in block:
            yield figure(f"{name}: save blocks the trainer", block[name] * 1e3, "ms")
        best = min(block["orbax disk"], block["orbax /dev/shm"])
        yield figure("2+2: blocking over orbax's own", block["2+2"] / best, "x", *bound("<= 1", block["2+2"] <= best))
        yield figure("2+2: blocking over memcpy", block["2+2"] / memcpy_s, "x", *bound("<= 1.2",
                     block["2+2"] <= 1.2 * memcpy_s))
        for name in saves:
            yield figure(f"{name}: complete save", saves[name], "s")
        for name in ("2+2", "3+1"):
            gain = saves["orbax /dev/shm"] / saves[name]
            yield figure(f"{name}: complete save, faster than orbax to /dev/shm", gain, "x",
                         *bound(">= 1.5", gain >= 1.5))

        held = [client.pool.peer(a).call("list", timeout_s=10)[0] for a in addresses]
        live = sum(o["bytes"] for h in held for o in h["objects"]) / 2 / nbytes  # two versions
        yield figure("2+2: agent memory of a version over the state", live, "x", "2.00 +- 5 %", abs(live / 2 - 1) <= 0.05)
        before = client.sent_bytes
        step += 1
        save("2+2")
        sent = client.sent_bytes - before
        save("3+1")
        layout = coded().manifest.layouts[0]
        want = sum(sent_bytes(layout).values())
        yield figure("2+2: bytes sent over the formula", sent / want, "x", "1.00 +- 1 %", abs(sent / want - 1) < 0.01)
        for name in ("orbax disk", "orbax /dev/shm"):
            save(name)

        disk, cached = folders["orbax disk"], "orbax disk, page cache"
        managers[cached] = managers["orbax disk"]
        restores: dict[str, list[float]] = {name: [] for name in managers}
        rates, fills = [], []
        found = coded()

        def fill() -> None:  # what every restore pays for memory alone; a hypervisor may have taken it
            empty_aligned(nbytes)[::4096] = 1

        for i in range(rounds + 1):
            if i:
                rates.append(transport_rate(client, found, addresses[0]))
                fills.append(seconds(fill))
            for name, values in restores.items():
                if name == "orbax disk":
                    drop_pages(disk)
                taken = seconds(lambda name=name: restore(name))
                assert np.array_equal(results.pop(name)["w3"], state["w3"])
                if i:
                    values.append(taken)
        for process in processes[1:3]:
            kill(process)
        degraded: dict[str, list[float]] = {"orbax disk": [], cached: [], "2+2": []}
        for i in range(rounds + 1):
            for name, values in degraded.items():
                if name == "orbax disk":
                    drop_pages(disk)
                taken = seconds(lambda name=name: restore(name))
                assert np.array_equal(results.pop(name)["w3"], state["w3"])
                if i:
                    values.append(taken)
        rest = {n: statistics.median(t) for n, t in restores.items()}
        rest2 = {n: statistics.median(t) for n, t in degraded.items()}
        rate = statistics.median(rates)
        for name, value in rest.items():
            yield figure(f"{name}: restore", value, "s")
        yield figure("fresh memory for the state, touched", statistics.median(fills), "s")
        yield figure("2+2: restore, two agents dead", rest2["2+2"], "s")
        for name in ("2+2", "3+1"):
            gain = rest["orbax disk"] / rest[name]
            yield figure(f"{name}: restore, faster than orbax from disk", gain, "x", *bound(">= 3", gain >= 3))
        yield figure("2+2: restore, faster than orbax from the page cache", rest[cached] / rest["2+2"], "x")
        gain = rest2["orbax disk"] / rest2["2+2"]
        yield figure("2+2: restore with two dead, faster than orbax from disk", gain, "x", *bound(">= 1.5", gain >= 1.5))
        yield figure("transport: chunks read and dropped", rate / 1e9, "GB/s")
        share = nbytes / rest["2+2"] / rate  # a quarter of the bytes lies in the own agent
        yield figure("2+2: restore rate over the transport's", share, "x", *bound(">= 0.6", share >= 0.6))
    copies = {}
    yield from _copies_figures(state, abstract, rounds, copies)
    yield from waste.waste_figures(
        waste.Measured(block["orbax disk"], saves["orbax disk"], rest["orbax disk"]),
        waste.Measured(copies["blocked"], copies["save"], copies["degraded"]),
        waste.Measured(block["2+2"], saves["2+2"], rest2["2+2"]))


def _copies_figures(
    state: Any, abstract: Any, rounds: int, medians: dict[str, float]
) -> Iterator[Figure]:
    """Two copies through the same agents and orbax's manager, as the other arms. Leaves its medians.

    Two agents hold what four would: each byte is on two hosts.
    """
    import jax
    import orbax.checkpoint as ocp

    from hetjax.eccheck import Config, handler_registry
    from hetjax.eccheck.tier import tier_of

    nbytes = sum(x.nbytes for x in state.values())
    folder = tempfile.mkdtemp(prefix="ecb")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, True)
        processes, addresses, socket = stack.enter_context(agents(2, int(nbytes * 1.03) + MIB))
        config = Config(agents=tuple(addresses), socket=socket, k=1, m=1)
        tier_of(config).client.local()
        manager = stack.enter_context(ocp.CheckpointManager(
            folder, options=ocp.CheckpointManagerOptions(max_to_keep=1),
            handler_registry=handler_registry(config)))
        times: dict[str, list[float]] = {"blocked": [], "save": [], "restore": [], "degraded": []}

        def restore() -> None:
            jax.block_until_ready(manager.restore(step, args=ocp.args.StandardRestore(abstract)))

        for step in range(rounds + 1):
            start = time.perf_counter()
            manager.save(step, args=ocp.args.StandardSave(state))
            times["blocked"].append(time.perf_counter() - start)
            manager.wait_until_finished()
            times["save"].append(time.perf_counter() - start)
            times["restore"].append(seconds(restore))
        held = next(f for f in tier_of(config).survey().found if f.step == step).num_bytes
        kill(processes[1])
        for _ in range(rounds + 1):
            times["degraded"].append(seconds(restore))
        medians.update({name: statistics.median(t[1:]) for name, t in times.items()})
        yield figure("2 copies: save blocks the trainer", medians["blocked"] * 1e3, "ms")
        yield figure("2 copies: complete save", medians["save"], "s")
        yield figure("2 copies: restore", medians["restore"], "s")
        yield figure("2 copies: restore, one agent dead", medians["degraded"], "s")
        yield figure("2 copies: agent memory of a version over the state", held / nbytes, "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="within 50 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--state-mib", type=int, default=0, help="state of the arms")
    parser.add_argument("--only", choices=("encode", "subsets", "arms"), help="one part")
    options = parser.parse_args()
    state_mib = options.state_mib or (64 if options.quick else 1024)
    figures: list[Figure] = []
    parts = {
        "encode": encode_figures([64] if options.quick else [64, 256], 5 if options.quick else 11),
        "subsets": waste.subset_figures(),
        "arms": arm_figures(state_mib, 1 if options.quick else 3),
    }
    for name, part in parts.items():
        for item in part if options.only in (None, name) else ():
            figures.append(item)
            if not options.json:
                mark = "" if not item["target"] else f"  {item['target']}: {'yes' if item['holds'] else 'NO'}"
                print(f"{item['name']:<68} {item['value']:>10.3f} {item['unit']}{mark}", flush=True)
    machine = {
        "cpus": os.cpu_count(), "load": os.getloadavg()[0], "machine": platform.machine(),
        "python": platform.python_version(), "state_mib": state_mib,
    }
    result: dict[str, Any] = {"figures": figures, "machine": machine,
                              "assumptions_of_time_wasted": waste.ASSUMPTIONS}
    if options.quick:
        result["not_measured"] = ["256 MiB encoding", "1 GiB of state: this run used "
                                  f"{state_mib} MiB, where fixed costs weigh more"]
    if options.json:
        print(json.dumps(result))
    else:
        if options.only in (None, "arms"):
            print("time wasted is counted so:", *(f"- {line}" for line in waste.ASSUMPTIONS), sep="\n")
        print(f"load {machine['load']:.1f} on {machine['cpus']} cores, state {state_mib} MiB")


if __name__ == "__main__":
    main()
