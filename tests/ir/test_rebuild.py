"""A graph that went through text lowers to the same numbers, or says what text does not hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.ir.errors import LoweringError
from hetjax.ir.exporter import export_jaxpr
from hetjax.ir.importer import import_jaxpr, inline_calls
from hetjax.ir.parser import parse_graph
from hetjax.ir.rebuild import rebuild_equations
from hetjax.ir.text import print_graph


def through_text(graph):
    return parse_graph(print_graph(graph, scopes=True))


def run(graph, values):
    closed = export_jaxpr(
        graph.name,
        graph.ops,
        [a.ref for a in graph.inputs],
        [r.atom for r in graph.outputs],
        graph.avals,
    )
    return jax.jit(jax.extend.core.jaxpr_as_fun(closed))(*values)


def loss(params, x, key):
    """Holds what real steps hold: gathers, scatters, loops, branches, keys, remat, sorts, weak types."""
    h = jnp.tanh(params["embed"][x])
    h = jax.checkpoint(lambda h: jax.nn.gelu(h @ params["w"]))(h)
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0)
    carry, _ = jax.lax.scan(lambda c, r: (c * 0.9 + r, c.sum()), jnp.zeros(h.shape[1:]), h)
    n = jax.lax.while_loop(lambda s: s < 3.0, lambda s: s + 1.0, carry.sum() * 0)
    picked = jax.lax.cond(n > 1, lambda h: jnp.sort(h, axis=-1), lambda h: h[..., ::-1], h)
    kernel = jnp.ones((3, 4, 4)) / 12
    conv = jax.lax.conv_general_dilated(
        picked, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return (conv**2).mean() + optax.l2_loss(carry).sum() + jnp.cumsum(h)[-1]


@pytest.fixture(scope="module")
def traced():
    params = {"embed": jnp.arange(20.0).reshape(5, 4) / 10, "w": jnp.eye(4) * 0.3}
    args = (params, jnp.array([[0, 1, 4], [2, 2, 3]]), jax.random.key(3))
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(*args)
    return import_jaxpr(closed, name="loss"), jax.tree.leaves(args)


def test_a_real_step_gives_the_same_numbers_through_text(traced):
    graph, values = traced
    values = [*values, *(graph.consts[a.ref] for a in graph.inputs if a.role == "const")]
    inlined = inline_calls(graph)
    assert through_text(graph) == graph
    rebuilt = rebuild_equations(through_text(inlined))
    assert rebuilt == inlined and all(op.eqn is not None for op in rebuilt.ops)
    for a, b in zip(run(inlined, values), run(rebuilt, values)):
        np.testing.assert_array_equal(a, b)


def test_calls_out_of_text_inline_to_the_same_ops(traced):
    graph, _ = traced
    a, b = inline_calls(graph), inline_calls(through_text(graph))
    assert a == b
    assert [op.scopes for op in a.ops] == [op.scopes for op in b.ops]


def test_a_graph_with_equations_is_left_alone(traced):
    graph, _ = traced
    assert rebuild_equations(graph) is graph


def test_captured_arrays_of_calls_become_inputs():
    table = jnp.arange(100.0)
    graph = import_jaxpr(jax.make_jaxpr(jax.jit(lambda x: table + x))(1.0), name="f")
    a, b = inline_calls(graph), inline_calls(through_text(graph))
    assert [i.role for i in b.inputs] == [i.role for i in a.inputs] == ["input", "const"]


FAULTS = [
    (
        "%1:f32[3] = no_such_thing %0",
        "no_such_thing: JAX has no primitive of that name that lowers",
    ),
    ("%1:f32[3] = sin %0 {accuracy=#f.g}", "sin: its parameter accuracy is #f.g, which is no text"),
    (
        "%1:f32[3] = convert_element_type %0 {new_dtype=Nope.X, sharding=None, weak_type=False}",
        "convert_element_type: Nope.X names nothing in JAX",
    ),
    (
        "%1:f32[3] = convert_element_type %0 {new_dtype=PRNG.dice, sharding=None, weak_type=False}",
        "convert_element_type: JAX has no generator dice",
    ),
    (
        "%1:f32[3] = sin %0 {accuracy=Odd(a=1)}",
        "sin: its parameter accuracy is a Odd, which has no public constructor",
    ),
    ("%1:f32[4] = sin %0 {accuracy=None}", "sin: sin gives f32[3], the text says f32[4]"),
    ("%1:f32[3] = sin %0 %0 {accuracy=None}", "sin: "),
    (
        '%1:f32[3] = jit %0 {jaxpr=graph g { in %0:f32[3] input "0" in %1:f32[9] const "const0" out %0 "0" }}',
        "jit: its graph g captures arrays (const0) that text does not hold",
    ),
]


@pytest.mark.parametrize(("op", "message"), FAULTS, ids=range(len(FAULTS)))
def test_what_text_does_not_hold_is_named(op, message):
    text = f'graph step {{ in %0:f32[3] input "x"\n {op} from "train.py:7"\n out %1 "y" }}'
    with pytest.raises(LoweringError) as caught:
        rebuild_equations(parse_graph(text))
    first, line = str(caught.value).splitlines()[:2]
    assert first == "step came from text, and 1 of its ops cannot be lowered:"
    primitive, _, rest = message.partition(": ")
    assert line.startswith(f"  {primitive} (train.py:7): {rest}")


def test_many_faults_are_counted():
    ops = "\n".join(f"%{i}:f32[] = nothing{i} %0" for i in range(1, 20))
    with pytest.raises(LoweringError, match="and 7 more"):
        rebuild_equations(parse_graph(f'graph g {{ in %0:f32[] input "x"\n{ops}\n out %1 "y" }}'))
