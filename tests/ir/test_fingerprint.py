"""A graph's digest: the same in every process, another for any other graph, none for what cannot be told."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.ir.fingerprint import graph_digest
from hetjax.ir.importer import import_jaxpr

TABLE = np.arange(6, dtype=np.float32)


def digest(fn, *args, **kwargs):
    return graph_digest(import_jaxpr(jax.make_jaxpr(fn)(*args, **kwargs), name="f"))


def scaled(x, by=2.0):
    return jax.jit(jnp.tanh)(x * by).sum()


def shifted(x, table=TABLE):
    return x + table


@pytest.mark.quick
def test_equal_steps_have_equal_digests():
    x = jnp.ones(6)
    assert digest(scaled, x) == digest(scaled, x)
    assert digest(shifted, x) == digest(lambda x: shifted(x), x)


@pytest.mark.parametrize(
    "other", [
        lambda x: digest(scaled, x.astype(jnp.bfloat16)), lambda x: digest(scaled, x, by=-2.0),
        lambda x: digest(scaled, x, by=2), lambda x: digest(scaled, x[:5]), lambda x: digest(jnp.sum, x),
    ], ids=["dtype", "literal", "type of a literal", "shape", "ops"],
)
def test_whatever_differs_makes_another_digest(other):
    assert other(jnp.ones(6)) != digest(scaled, jnp.ones(6))


def test_one_element_of_a_captured_array_makes_another_digest():
    changed = TABLE.copy()
    changed[3] = np.nextafter(changed[3], 9)
    x = jnp.ones(6)
    assert digest(lambda x: shifted(x, changed), x) != digest(lambda x: shifted(x, TABLE), x)


def test_zero_and_minus_zero_are_two_literals():
    def pad(by):
        return digest(lambda x: jnp.maximum(x, by), jnp.ones(2))

    assert pad(0.0) != pad(-0.0)


def test_a_callable_in_a_parameter_has_no_digest():
    def fn(x):
        return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct((2,), "float32"), x)

    assert digest(fn, jnp.ones(2)) is None


def test_another_process_finds_the_same_digest():
    code = (
        "import jax, jax.numpy as jnp\n"
        "from hetjax.ir.fingerprint import graph_digest\n"
        "from hetjax.ir.importer import import_jaxpr\n"
        "def f(k, x): return jax.nn.gelu(x @ x) + jax.random.normal(k, (3, 3))\n"
        "g = import_jaxpr(jax.make_jaxpr(f)(jax.random.key(0), jnp.ones((3, 3))), name='f')\n"
        "print(graph_digest(g))"
    )
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1 and len(found.pop().strip()) == 64
