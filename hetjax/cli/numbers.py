"""Whether two graphs compute the same: both run on the same random inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.ir.dtypes import is_inexact, is_key
from hetjax.ir.errors import LoweringError

if TYPE_CHECKING:
    from hetjax.ir.bundle import Bundle
    from hetjax.ir.graph import Aval, Graph

SEED = 2026
# Passes may reorder sums, so equality is to rounding: relative to the largest element of each output.
RTOL = {"f64": 1e-12, "f32": 1e-5, "bf16": 2e-2, "f16": 5e-3}


def random_inputs(graph: Graph) -> list[Any]:
    """Returns one array per input leaf, the same for the same types: values near 1, small integers."""
    rng = np.random.default_rng(SEED)
    return [_random(graph.avals[a.ref], rng) for a in graph.inputs]


def _random(aval: Aval, rng: np.random.Generator) -> Any:
    import jax

    from hetjax.ir.exporter import numpy_dtype

    if is_key(aval.dtype):
        key = jax.random.key(SEED)
        return jax.random.split(key, aval.shape) if aval.shape else key
    if aval.dtype == "float0":
        return np.zeros(aval.shape, jax.dtypes.float0)
    if is_inexact(aval.dtype):
        return rng.uniform(0.5, 1.5, aval.shape).astype(numpy_dtype(aval.dtype))
    return rng.integers(0, 2, aval.shape).astype(numpy_dtype(aval.dtype))


def run_graph(graph: Graph, inputs: list[Any]) -> list[Any]:
    """Returns the outputs of a graph, which may come from text.

    Raises:
      LoweringError: it holds what text cannot say.
    """
    import jax

    from hetjax.ir import _jax
    from hetjax.ir.exporter import export_jaxpr
    from hetjax.ir.importer import inline_calls
    from hetjax.ir.rebuild import rebuild_equations

    try:
        graph = rebuild_equations(graph)
    except LoweringError:
        # The derivative a custom call carries is no text, and nothing differentiates here: its body is enough.
        graph = rebuild_equations(inline_calls(graph))
    closed = export_jaxpr(
        graph.name,
        graph.ops,
        [a.ref for a in graph.inputs],
        [r.atom for r in graph.outputs],
        graph.avals,
    )
    out = jax.jit(_jax.jaxpr_function(closed))(*inputs)
    keys = [is_key(graph.aval(r.atom).dtype) for r in graph.outputs]
    return [jax.random.key_data(x) if key else x for x, key in zip(out, keys)]


def same_numbers(reference: Bundle) -> Callable[[Bundle], bool]:
    """Returns a check that a bundle's graph gives the outputs of another's."""
    expected: dict[str, list[Any]] = {}

    def check(bundle: Bundle) -> bool:
        if bundle.graph is None or reference.graph is None:
            return False
        if not expected:
            expected["out"] = run_graph(reference.graph, random_inputs(reference.graph))
        got = run_graph(bundle.graph, random_inputs(bundle.graph))
        names = [bundle.graph.aval(r.atom).dtype for r in bundle.graph.outputs]
        return len(got) == len(expected["out"]) and all(map(_close, got, expected["out"], names))

    return check


def _close(a: Any, b: Any, dtype: str) -> bool:
    x, y = np.asarray(a), np.asarray(b)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not is_inexact(dtype):
        return bool(np.array_equal(x, y))
    x, y = x.astype(np.complex128), y.astype(np.complex128)
    scale = np.max(np.abs(y[np.isfinite(y)]), initial=0.0)
    return bool(np.allclose(x, y, rtol=0, atol=RTOL.get(dtype, 1e-5) * scale, equal_nan=True))
