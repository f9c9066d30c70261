"""What hetjax costs: imports, the command's start, a step on one device, a step in stages, a second start.

    python benchmarks/runtime.py            the whole run, some minutes
    python benchmarks/runtime.py --quick    within 50 s
    python benchmarks/runtime.py --json     one object

Arms are run in turns and compared by the median of their ratios: what else the machine does hits all alike.
The model is the demo's.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from _report import Figure, Report, at_most, interleaved, main, median_ratio

ROOT = pathlib.Path(__file__).resolve().parents[1]
ENV = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "HETJAX_DISABLE")} | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "JAX_PLATFORMS": "cpu",
}
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "32"}


def python(*args: str, **changes: str) -> str:
    """Returns what a fresh Python prints."""
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=ENV | changes, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)} failed:\n{done.stderr}")
    return done.stdout


def import_seconds(statement: str) -> Callable[[], float]:
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return lambda: float(python("-c", code))


def imports(seconds: float) -> list[Figure]:
    arms = {
        "jax": import_seconds("import jax"), "hetjax": import_seconds("import hetjax"),
        "used": import_seconds("import jax, hetjax; hetjax.parallelize"),
    }
    medians, rounds = interleaved(arms, seconds)
    return [
        Figure("import jax", medians["jax"], "s"),
        at_most("import hetjax / import jax", median_ratio(rounds, "hetjax", "jax"), "", 1.15),
        Figure("import jax and hetjax, decorate a step / import jax", median_ratio(rounds, "used", "jax"), ""),
    ]


def help_start(seconds: float) -> list[Figure]:
    def once() -> float:
        begin = time.perf_counter()
        python("-m", "hetjax", "--help")
        return time.perf_counter() - begin

    return [at_most("hetjax --help", interleaved({"help": once}, seconds)[0]["help"], "s", 0.4)]


def one_device(framework: str, seconds: float) -> list[Figure]:
    got = json.loads(python(__file__, "--arm", "one-device", framework, str(seconds)))
    return [
        Figure(f"{framework}: plain jit, one device", got["plain_s"] * 1e3, "ms/step"),
        at_most(f"{framework}: hetjax / plain jit, one stage and one device", got["ratio"], "", 1.05),
    ]


def stages(seconds: float) -> list[Figure]:
    got = json.loads(python(__file__, "--arm", "stages", "", str(seconds), **EIGHT))
    name = "2 stages, 4 microbatches"
    return [
        Figure(f"{name}: a step", got["step_s"] * 1e3, "ms"),
        Figure(f"{name}: sum of the stage calls, each run alone", got["calls_s"] * 1e3, "ms"),
        Figure(f"{name}: a step above the sum of the stage calls", got["above_s"] * 1e3, "ms"),
        Figure(f"{name}: dispatch, until the call returns", got["dispatch_s"] * 1e3, "ms"),
    ]


def second_start(pairs: int) -> list[Figure]:
    """A start is from the command's begin to the end of the first step; each first one has an empty cache."""

    def start(cache: str) -> float:
        args = ("-m", "hetjax", "demo", "--steps", "1", "--no-parity", "--json")
        return float(json.loads(python(*args, XDG_CACHE_HOME=cache))["first_step_s"])

    rounds = []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as cache:
            rounds.append({"first": start(cache), "second": start(cache)})
    return [
        Figure("demo: first start to the end of its first step", statistics.median(r["first"] for r in rounds), "s"),
        Figure("demo: second start to the end of its first step", statistics.median(r["second"] for r in rounds), "s"),
        at_most("demo: second start / first start", median_ratio(rounds, "second", "first"), "", 0.3),
    ]


# ---------------------------------------------------------------------------- inside the subprocesses


def timed(step: Callable[[], Any], count: int) -> float:
    """Returns seconds a call, over `count` calls in flight together."""
    import jax

    begin = time.perf_counter()
    out = [step() for _ in range(count)]
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / count


def arm_one_device(framework: str, seconds: float) -> None:
    import jax

    import hetjax
    from hetjax.demo import session, training
    from hetjax.demo.text import batches, load_corpus

    corpus = load_corpus()
    config = training.Config(corpus.vocab_size)
    fresh = session.fresh_states(framework, config, training.adamw(300))
    batch = jax.device_put(next(batches(corpus.train, session.BATCH_SIZE, config.length, seed=0)))
    train_step = session.model_of(framework).train_step
    steps = {
        "plain": session.jit_of(framework)(train_step),
        "hetjax": hetjax.parallelize(train_step, num_stages=1, num_microbatches=1, mesh="1,1"),
    }
    arms = {}
    for name, step in steps.items():
        held = [fresh()]

        def advance(step: Any = step, held: list[Any] = held) -> Any:
            if framework == "nnx":
                return step(*held[0], batch)
            held[0], out = step(held[0], batch)
            return out

        timed(advance, 2)
        arms[name] = lambda advance=advance: timed(advance, 5)
    medians, rounds = interleaved(arms, seconds)
    print(json.dumps({"ratio": median_ratio(rounds, "hetjax", "plain"), "plain_s": medians["plain"]}))


def arm_stages(seconds: float) -> None:
    import jax

    from hetjax.demo import session
    from hetjax.demo.text import batches

    opened = session.open_session("linen", 300)
    batch = next(batches(opened.corpus.train, session.BATCH_SIZE, opened.config.length, seed=0))

    def advance() -> Any:
        return session.advance(opened, opened.step, batch)

    timed(advance, 2)
    executor = opened.step._latest.executor
    calls: list[float] = []

    def alone(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            jax.block_until_ready(args)
            begin = time.perf_counter()
            out = jax.block_until_ready(call(*args))
            calls.append(time.perf_counter() - begin)
            return out

        return run

    def calls_alone() -> float:
        runs = [i for i in executor._instructions if hasattr(i, "call")]
        plain = [i.call for i in runs]
        for instruction in runs:
            instruction.call = alone(instruction.call)
        calls.clear()
        jax.block_until_ready(advance())
        for instruction, call in zip(runs, plain):
            instruction.call = call
        return sum(calls)

    def dispatch() -> float:
        jax.block_until_ready(opened.state)
        begin = time.perf_counter()
        advance()
        return time.perf_counter() - begin

    arms = {"step_s": lambda: timed(advance, 3), "calls_s": calls_alone, "dispatch_s": dispatch}
    medians, rounds = interleaved(arms, seconds)
    above = statistics.median(r["step_s"] - r["calls_s"] for r in rounds)
    print(json.dumps(medians | {"above_s": above}))


def run(report: Report) -> None:
    quick = report.quick
    report.measure("imports", 8, lambda: imports(4 if quick else 60))
    report.measure("hetjax --help", 3, lambda: help_start(1 if quick else 10))
    for framework in ("linen", "nnx"):
        report.measure(
            f"{framework}: hetjax / plain jit, one stage and one device", 14,
            lambda f=framework: one_device(f, 4 if quick else 60),
        )
    report.measure("2 stages, 4 microbatches", 18, lambda: stages(4 if quick else 60))
    report.measure("demo: second start / first start", 25, lambda: second_start(1 if quick else 5))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        _, _, arm, framework, seconds = sys.argv
        arm_one_device(framework, float(seconds)) if arm == "one-device" else arm_stages(float(seconds))
    else:
        main(__doc__ or "", run)
