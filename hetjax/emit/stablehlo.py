"""The whole step as one StableHLO module, as JAX lowers it."""

from __future__ import annotations

from typing import Any

from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import LoweringError
from hetjax.ir.exporter import export_jaxpr, to_jax_aval
from hetjax.ir.graph import Aval
from hetjax.ir.rebuild import rebuild_equations


def emit_stablehlo(bundle: Bundle) -> str:
    """Returns the graph as a StableHLO module, verified by MLIR.

    Raises:
      LoweringError: the bundle has no graph, or it holds what text cannot say.
    """
    if bundle.graph is None:
        raise LoweringError("there is no graph to write as StableHLO; trace a step first")
    graph = rebuild_equations(bundle.graph)
    closed = export_jaxpr(
        graph.name,
        graph.ops,
        [a.ref for a in graph.inputs],
        [r.atom for r in graph.outputs],
        graph.avals,
    )
    function = _jax.jaxpr_function(closed)
    function.__name__ = graph.name
    module = _jax.lower_to_module(function, [struct_of(graph.avals[a.ref]) for a in graph.inputs])
    if not module.operation.verify():
        raise LoweringError(f"JAX lowered {graph.name} to a module that MLIR refuses")
    return str(module)


def struct_of(aval: Aval) -> Any:
    """Returns the ShapeDtypeStruct of a type."""
    return _jax.shaped(to_jax_aval(aval))
