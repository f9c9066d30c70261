"""Every kind of equation parameter seen in real steps has a textable, deterministic form."""

import enum
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from hetjax.ir.graph import Aval, Graph, Handle, Op, Record, Symbol, subgraphs
from hetjax.ir.params_text import encode_param

EMPTY = Graph("g", (), (), (), ())


def encode(value, import_graph=lambda jaxpr, name: Graph(name, (), (), (), ())):
    return encode_param("p", value, import_graph)


def params_of(function, *args):
    """Encoded parameters of all equations, nested ones included, as {(primitive, name): value}."""
    found = {}

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            for name, value in eqn.params.items():
                found[eqn.primitive.name, name] = encode_param(name, value, visit)

    def visit(jaxpr, name):
        walk(getattr(jaxpr, "jaxpr", jaxpr))
        return Graph(name, (), (), (), ())

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (-0.0, -0.0),
        (1 + 2j, 1 + 2j),
        ("VALID", "VALID"),
        ([1, (2,)], (1, (2,))),
        (Colour.RED, Symbol("Colour.RED")),
        (np.dtype("float32"), Symbol("f32")),
        (jnp.bfloat16, Symbol("bf16")),
        (np.int8, Symbol("i8")),
        (jax.dtypes.float0, Symbol("float0")),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (ml_dtypes.bfloat16(0.5), 0.5),
        (slice(1, None, 2), Record("slice", (("start", 1), ("stop", None), ("step", 2)))),
        (frozenset({2, 1}), Record("frozenset", (("items", (1, 2)),))),
        ({"b": 1, "a": 2}, Record("dict", (("items", (("a", 2), ("b", 1))),))),
        (
            PartitionSpec("data", None, ("x", "y")),
            Record("PartitionSpec", (("partitions", ("data", None, ("x", "y"))),)),
        ),
        (jax.core.ShapedArray((2, 3), jnp.float32), Aval("f32", (2, 3))),
        (
            np.arange(2, dtype=np.int32),
            Record("array", (("dtype", Symbol("i32")), ("shape", (2,)), ("data", (0, 1)))),
        ),
    ],
    ids=repr,
)
def test_encode_param_gives_the_textable_form(value, expected):
    got = encode(value)
    assert got == expected
    assert type(got) is type(expected)


def test_typed_keys_and_prng_implementations_are_symbols():
    assert encode(jax.random.key(0).dtype) == Symbol("key<fry>")
    assert params_of(lambda: jax.random.key(0))["random_seed", "impl"] == Symbol(
        "PRNG.threefry2x32"
    )


def test_every_nan_is_one_object_so_that_tuples_compare_equal():
    first, second = encode((float("nan"),)), encode((np.float32("nan"),))
    assert first == second
    assert first[0] is math.nan


def test_a_gathers_dimension_numbers_read_as_attributes():
    params = params_of(lambda x: x[jnp.array([0, 1])], jnp.ones((4, 3)))
    numbers = params["gather", "dimension_numbers"]
    assert numbers.kind == "GatherDimensionNumbers"
    assert numbers.offset_dims == (1,)
    assert params["gather", "mode"].name.startswith("GatherScatterMode.")
    with pytest.raises(AttributeError, match="GatherDimensionNumbers has no field 'axis'"):
        numbers.axis  # noqa: B018


def test_nested_jaxprs_become_graphs_named_after_the_parameter():
    params = params_of(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), 1.0)
    assert [g.name for g in params["cond", "branches"]] == ["branches.0", "branches.1"]


def test_subgraphs_finds_graphs_inside_records():
    op = Op("custom_linear_solve", (), (), (("jaxprs", Record("solve", (("matvec", EMPTY),))),))
    assert list(subgraphs(op)) == [EMPTY]


def test_callables_and_shardings_become_handles_without_addresses():
    def outer():
        return lambda x: x

    mesh = jax.make_mesh((2, 2), ("data", "model"))
    device = jax.devices()[0]
    cases = {
        "test_callables_and_shardings_become_handles_without_addresses.outer.lambda": outer(),
        "test_callables_and_shardings_become_handles_without_addresses.outer": functools.partial(
            outer
        ),
        "NamedSharding(data=2,model=2;data,-)": NamedSharding(mesh, PartitionSpec("data", None)),
        "Mesh(data=2,model=2)": mesh,
        "object": object(),
        "array(f32[100])": np.zeros(100, np.float32),
    }
    for name, value in cases.items():
        got = encode(value)
        assert got == Handle(name)
        assert got.value is value
    assert "0x" not in encode(SingleDeviceSharding(device)).name
    assert encode(jax.sharding.AbstractMesh((), ())) == Symbol("AbstractMesh.empty")


def test_a_custom_rule_is_a_handle_and_its_body_a_graph():
    params = params_of(jax.nn.relu, 1.0)
    assert isinstance(params["custom_jvp_call", "call_jaxpr"], Graph)
    assert isinstance(params["custom_jvp_call", "jvp_jaxpr_fun"], Handle)
