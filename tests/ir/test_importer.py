"""A jaxpr becomes a graph and comes back as the same computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.errors import LoweringError
from hetjax.ir import _jax
from hetjax.ir.exporter import export_jaxpr
from hetjax.ir.graph import Argument, Literal
from hetjax.ir.importer import import_jaxpr, inline_calls

TABLE = np.arange(6, dtype=np.float32).reshape(2, 3)


@jax.jit
def inner(x, scale):
    with jax.named_scope("inner"):
        return jax.nn.relu(x * scale) + TABLE


def outer(x, key):
    with jax.named_scope("outer"):
        y = inner(x, 2.0)
        z = jax.lax.scan(lambda c, v: (c + v.sum(), c), 0.0, y)[0]
    return y @ y.T, z, jax.random.bits(key, (2,)), jnp.float32(jnp.inf), x


def trace():
    return jax.make_jaxpr(outer)(jnp.ones((2, 3)), jax.random.key(3))


def run(graph, arrays):
    refs = [a.ref for a in graph.inputs]
    given = {**dict(zip(refs, arrays)), **graph.consts}
    closed = export_jaxpr("f", graph.ops, refs, [r.atom for r in graph.outputs], graph.avals)
    return jax.jit(_jax.jaxpr_function(closed))(*(given[r] for r in refs))


@pytest.mark.quick
@pytest.mark.parametrize("inline", [False, True])
def test_import_and_export_compute_the_same(inline):
    graph = import_jaxpr(trace(), name="outer")
    graph = inline_calls(graph) if inline else graph
    x, key = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), jax.random.key(3)
    for a, b in zip(run(graph, [x, key]), outer(x, key), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.quick
def test_inlining_concatenates_name_stacks_and_lifts_captured_arrays():
    graph = inline_calls(import_jaxpr(trace(), name="outer"))
    assert not {"jit", "pjit", "custom_jvp_call"} & {op.primitive for op in graph.ops}
    scopes = {tuple(n for k, n in op.scopes if k == "scope") for op in graph.ops}
    assert ("outer", "inner") in scopes
    assert [a.role for a in graph.inputs].count("const") == len(graph.consts)
    assert any(np.array_equal(c, TABLE) for c in graph.consts.values()) or TABLE.size <= 1
    assert inline_calls(graph) is graph


@pytest.mark.quick
def test_refs_are_numbered_in_order_of_definition_and_the_same_at_another_batch_size():
    def f(w, x):
        return jnp.tanh(x @ w).mean()

    graphs = [
        inline_calls(import_jaxpr(jax.make_jaxpr(f)(jnp.ones((3, 4)), jnp.ones((n, 3))), name="f"))
        for n in (8, 2)
    ]
    for graph in graphs:
        defined = [a.ref for a in graph.inputs] + [r for op in graph.ops for r in op.outputs]
        assert defined == list(range(len(graph.avals)))
    assert [op.outputs for op in graphs[0].ops] == [op.outputs for op in graphs[1].ops]
    assert [op.primitive for op in graphs[0].ops] == [op.primitive for op in graphs[1].ops]


@pytest.mark.quick
def test_roles_paths_and_sources_are_kept():
    arguments = [Argument(0, "state/w", "state"), Argument(0, "batch/x", "batch", 0)]
    closed = jax.make_jaxpr(lambda w, x: x @ w)(jnp.ones((3, 4)), jnp.ones((2, 3)))
    graph = import_jaxpr(closed, name="f", arguments=arguments)
    assert [(a.path, a.role, a.batch_axis) for a in graph.inputs] == [
        ("state/w", "state", None), ("batch/x", "batch", 0),
    ]
    assert "test_importer.py:" in graph.ops[0].source


@pytest.mark.quick
def test_literals_compare_by_what_is_written():
    closed = jax.make_jaxpr(lambda x: (x * jnp.float32(-0.0), jnp.where(x > 0, jnp.nan, x)))(1.0)
    graph = inline_calls(import_jaxpr(closed, name="f"))
    literals = [a for op in graph.ops for a in op.inputs if isinstance(a, Literal)]
    assert any(repr(x.value) == "-0.0" for x in literals)
    nan = next(x for x in literals if x.value != x.value)
    assert nan == Literal(float("nan"), nan.aval)
    assert Literal(0.0, nan.aval) != Literal(-0.0, nan.aval)


@pytest.mark.quick
def test_a_graph_without_equations_is_refused_by_name():
    import dataclasses

    graph = import_jaxpr(trace(), name="outer")
    ops = tuple(dataclasses.replace(op, eqn=None) for op in graph.ops)
    with pytest.raises(LoweringError, match="came from text"):
        export_jaxpr("f", ops, [a.ref for a in graph.inputs], [], graph.avals)


@pytest.mark.quick
def test_a_scope_named_like_a_transform_is_a_scope():
    def f(x):
        with jax.named_scope("transpose(jvp(x))"):
            return x + 1

    graph = import_jaxpr(jax.make_jaxpr(f)(1.0), name="f")
    assert graph.ops[0].scopes == (("scope", "transpose(jvp(x))"),)
