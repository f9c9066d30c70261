"""The text form: print, parse and verify a whole train step, beside jaxlib's MLIR for the same step.

    python benchmarks/ir.py            the whole run, a table
    python benchmarks/ir.py --quick    fewer rounds, within 50 s
    python benchmarks/ir.py --json     one object

The step is a 12-block transformer with adamw: about 7,000 equations once its calls are inlined.
Times are the best of some rounds, of CPU time: a figure for the code, not for the machine's other work.
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


def figure(name: str, value: float, unit: str, target: str, holds: bool) -> Figure:
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": holds}


def train_step(num_blocks: int = 12) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the step and its abstract arguments."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
            y = nn.gelu(nn.Dense(256)(nn.LayerNorm()(x)))
            return x + nn.Dense(64)(y)

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(1000, 64)(tokens)
            for _ in range(num_blocks):
                x = Block()(x)
            return nn.Dense(1000)(nn.LayerNorm()(x))

    model, optimizer = Transformer(), optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    state = jax.eval_shape(optimizer.init, params)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits: Any = model.apply(params, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, state, tokens)


def best_s(run: Callable[[], Any], rounds: int) -> float:
    """Returns the least CPU seconds of some runs."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def ours(closed: Any, rounds: int) -> list[Figure]:
    """Returns figures of the graph: print, parse, verify, round trip."""
    from hetjax.ir.importer import import_jaxpr, inline_calls
    from hetjax.ir.parser import parse_graph
    from hetjax.ir.text import print_graph
    from hetjax.ir.verify import verify_graph

    start = time.process_time()
    graph = inline_calls(import_jaxpr(closed, name="step"))
    imported_s = time.process_time() - start
    text = print_graph(graph, scopes=True)
    equal = parse_graph(text) == graph
    printed = best_s(lambda: print_graph(graph, scopes=True), rounds)
    parsed = best_s(lambda: parse_graph(text), rounds)
    verified = best_s(lambda: verify_graph(graph), rounds)
    return [
        figure("equations", len(graph.ops), "ops", "about 7000", 6500 <= len(graph.ops) <= 7500),
        figure("import from jaxpr", imported_s, "s CPU", "", True),
        figure("text", len(text) / 1e6, "MB", "", True),
        figure("print", printed, "s CPU", "<= 0.15", printed <= 0.15),
        figure("parse", parsed, "s CPU", "<= 1.2", parsed <= 1.2),
        figure("verify", verified, "s CPU", "<= 0.15", verified <= 0.15),
        figure("parse(print(graph)) equals graph", float(equal), "bool", "1", equal),
    ]


def mlir(step: Callable[..., Any], arguments: tuple[Any, ...], rounds: int) -> list[Figure]:
    """Returns the same figures for jaxlib's StableHLO module of the step."""
    import jax

    start = time.process_time()
    module: Any = jax.jit(step).lower(*arguments).compiler_ir("stablehlo")
    lowered_s = time.process_time() - start
    text = str(module)
    parse = type(module).parse
    with module.context:
        return [
            figure("StableHLO: trace and lower", lowered_s, "s CPU", "", True),
            figure("StableHLO: text", len(text) / 1e6, "MB", "", True),
            figure("StableHLO: print", best_s(lambda: str(module), rounds), "s CPU", "", True),
            figure("StableHLO: parse", best_s(lambda: parse(text), rounds), "s CPU", "", True),
            figure("StableHLO: verify", best_s(module.operation.verify, rounds), "s CPU", "", True),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    args = parser.parse_args()
    from importlib.metadata import version

    import jax

    rounds = 5 if args.quick else 15
    step, arguments = train_step()
    start = time.process_time()
    closed = jax.make_jaxpr(step)(*arguments)
    figures = [figure("trace, by JAX", time.process_time() - start, "s CPU", "", True)]
    figures += ours(closed, rounds)
    figures += mlir(step, arguments, rounds)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
    }
    if args.json:
        print(json.dumps({"figures": figures, "machine": machine, "not_measured": []}))
        return
    for f in figures:
        verdict = "" if not f["target"] else "  holds" if f["holds"] else "  DOES NOT HOLD"
        print(f"{f['name']:36} {f['value']:10.4g} {f['unit']:6} {f['target']:10}{verdict}")
    print(f"machine: {machine}")


if __name__ == "__main__":
    main()
