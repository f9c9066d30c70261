"""The microbatch prover: how long it takes on a whole train step, and what it hoists.

    python benchmarks/prover.py            the whole run, a table
    python benchmarks/prover.py --quick    fewer rounds and steps, within 50 s
    python benchmarks/prover.py --json     one object

The step is a 12-block transformer with clipping and adamw, 4 microbatches. Times are the best of some
rounds, of CPU time: a figure for the code, not for the machine's other work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

Figure = dict[str, Any]
BATCH, LENGTH, VOCABULARY, MICROBATCHES = 8, 32, 1000, 4
# name: (dropout rate, loss, whether it is to be proved)
STEPS = {
    "mean loss": (0.0, "mean", True),
    "token-weighted mean, dropout": (0.1, "weighted", True),
    "batch statistics in the loss": (0.0, "statistics", False),
}


def figure(name: str, value: float, unit: str, target: str, holds: bool) -> Figure:
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": holds}


def train_step(rate: float, kind: str) -> tuple[Callable[..., Any], Any, Any]:
    """Returns a step, its abstract state and its abstract batch."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.LayerNorm()(x)
            y = nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
            x = x + nn.Dropout(rate, deterministic=not rate)(y)
            y = nn.gelu(nn.Dense(256)(nn.LayerNorm()(x)))
            return x + nn.Dropout(rate, deterministic=not rate)(nn.Dense(64)(y))

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(VOCABULARY, 64)(tokens)
            for _ in range(12):
                x = Block()(x)
            return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))

    model = Transformer()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(lambda t: model.init(jax.random.key(0), t), tokens)
    state = (params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((), jnp.int32))

    def step(state: Any, tokens: Any) -> Any:
        params, opt, count = state

        def loss(params: Any) -> Any:
            key = jax.random.fold_in(jax.random.key(1), count)
            logits: Any = model.apply(params, tokens, rngs={"dropout": key})
            per_token = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
            if kind == "weighted":
                mask = (tokens > 0).astype(per_token.dtype)
                return (per_token * mask).sum() / mask.sum()
            return per_token.mean() + (logits.std(axis=0).mean() if kind == "statistics" else 0)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt, count + 1), value

    return step, state, tokens


def graphs(step: Callable[..., Any], state: Any, tokens: Any) -> tuple[Any, Any, float]:
    """Returns the step's graph whole and at one microbatch, and the CPU seconds of the second trace."""
    import jax

    from hetjax.ir.graph import Argument
    from hetjax.ir.importer import import_jaxpr, inline_calls
    from hetjax.passes.label_regions import label_regions

    def graph(size: int) -> Any:
        batch = jax.ShapeDtypeStruct((size, LENGTH), tokens.dtype)
        arguments = [Argument(0, f"state/{i}", "state") for i in range(len(jax.tree.leaves(state)))]
        arguments.append(Argument(0, "batch/tokens", "batch", 0))
        closed = jax.make_jaxpr(step)(state, batch)
        return label_regions(inline_calls(import_jaxpr(closed, name="step", arguments=arguments)))

    full = graph(BATCH)
    start = time.process_time()
    return full, graph(BATCH // MICROBATCHES), time.process_time() - start


def measure(name: str, rounds: int) -> list[Figure]:
    """Returns the figures of one step."""
    from hetjax.passes.prover import explain, prove

    rate, kind, provable = STEPS[name]
    full, micro, traced_s = graphs(*train_step(rate, kind))
    times = []
    for _ in range(rounds):
        start = time.process_time()
        proof = prove(full, micro, MICROBATCHES)
        times.append(time.process_time() - start)
    summary, proved_s = explain(proof, full), min(times)
    verdict = "proved" if provable else "refused"
    return [
        figure(f"{name}: ops", len(full.ops), "ops", ">= 7000", len(full.ops) >= 7000),
        figure(f"{name}: second trace", traced_s, "s CPU", "", True),
        figure(f"{name}: prove", proved_s, "s CPU", "< 1", proved_s < 1),
        figure(f"{name}: {verdict}", summary.proved == provable, "bool", "1", summary.proved == provable),
        figure(f"{name}: kept at full batch", summary.hoisted_bytes, "bytes", "", True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    args = parser.parse_args()
    from importlib.metadata import version

    names = list(STEPS)[:1] if args.quick else list(STEPS)
    figures = [f for name in names for f in measure(name, 3 if args.quick else 7)]
    left_out = [name for name in STEPS if name not in names]
    machine = {
        "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(), "jax": version("jax"), "jaxlib": version("jaxlib"),
    }  # fmt: skip
    if args.json:
        print(json.dumps({"figures": figures, "machine": machine, "not_measured": left_out}))
        return
    for f in figures:
        verdict = "" if not f["target"] else f"{f['target']}: {'holds' if f['holds'] else 'MISSED'}"
        print(f"{f['name']:<48} {f['value']:>12,.3f} {f['unit']:<8} {verdict}")
    if left_out:
        print(f"not measured: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
