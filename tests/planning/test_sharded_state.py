"""State split over a stage's replicas: plain jit's numbers, and the exchanges and bytes that XLA has."""

import collections
import dataclasses
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.explaining.movements import movements
from hetjax.ir.cluster import Cluster
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.cost.memory import replica_split
from hetjax.planning.outlines import _over_replicas
from tests.support import assert_same, copy_tree, make_batch, make_linen, make_nnx

REPLICAS = 2


def split_plan(step, *args, microbatches, sharding):
    """Returns a plan of two stages of two replicas that split their state."""
    plain = hetjax.parallelize(step, num_stages=2, num_microbatches=microbatches, mesh=f"{REPLICAS},1")
    plan = plain.plan_for(*args)
    graph = plain._in_use().bundle.graph
    leaves = [a for a in graph.inputs if a.role == "state"]
    specs = _over_replicas(graph, leaves, REPLICAS, {}, sharding)
    assert any("data" in dim for spec in specs.values() for dim in spec)
    return dataclasses.replace(plan, state_specs=tuple(sorted(specs.items()))), plain


@pytest.mark.parametrize(("sharding", "microbatches"), [("all", 2), ("optimizer", 1)])
def test_the_numbers_are_plain_jits_and_each_replica_holds_its_part(sharding, microbatches):
    step, state, batch = make_linen(blocks=1, tx=optax.adam(1e-3))
    plan, plain = split_plan(step, state, batch, microbatches=microbatches, sharding=sharding)
    parallel = hetjax.parallelize(step, plan=plan)
    ours, theirs = copy_tree(state), copy_tree(state)
    for _ in range(2):
        ours, out = parallel(ours, batch)
        theirs, expected = jax.jit(step)(theirs, batch)
    moment = ours.opt_state[0].mu["head"]["kernel"]
    assert moment.addressable_shards[0].data.size == moment.size // REPLICAS
    kernel = ours.params["head"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // (REPLICAS if sharding == "all" else 1)
    assert_same(jax.device_get(ours), jax.device_get(theirs))
    assert_same(jax.device_get(out), jax.device_get(expected))

    before, after = (estimate_program(p._in_use().bundle).memory for p in (plain, parallel))
    for old, new in zip(before, after):
        assert new.optimizer < 0.6 * old.optimizer
        assert (new.parameters < 0.6 * old.parameters) == (sharding == "all")
    predicted = collections.Counter()
    for m in movements(parallel._in_use().bundle):
        if "axis data" in m.where and m.nbytes > 64:
            predicted[m.fragment, m.kind] += m.nbytes
    for name, compiled in parallel._in_use().executor._fragments.items():
        measured = collections.Counter(exchanges_in(compiled.executable.as_text()))
        for kind in ("all-gather", "all-reduce"):
            want = predicted[name, kind] + (predicted[name, "reduce-scatter"] if kind == "all-reduce" else 0)
            # Where the table of a lookup is split by features, XLA gathers what was looked up instead.
            assert 0.7 * want - 300 <= measured[kind] <= 1.1 * want + 300, (name, kind)


def exchanges_in(text):
    """Returns (kind, bytes of the whole value) of the collectives in compiled HLO of float32 values.

    XLA on CPU has no reduce-scatter: it sums all of a value and slices.
    """
    out = collections.Counter()
    for line in text.splitlines():
        found = re.search(r"= (.*?) (all-gather|all-reduce|reduce-scatter)(?:-start)?\(", line)
        if found:
            for dims in re.findall(r"f32\[([\d,]*)\]", found[1]):
                out[found[2]] += 4 * math.prod(int(n) for n in dims.split(",") if n)
    return out


def test_a_search_splits_state_where_only_that_fits(tmp_path, monkeypatch):
    monkeypatch.setenv("HETJAX_CACHE", str(tmp_path))
    step, state, _ = make_linen(blocks=2, tx=optax.adam(1e-3))
    batch = make_batch(24)
    toml = (pathlib.Path(hetjax.__file__).parent / "demo" / "two_sites.toml").read_text()
    room = 40_000  # what parameters, gradients and moments of the whole model take
    small = Cluster.parse(toml.replace('like = "cpu"\n', f'like = "cpu"\nmemory_bytes = {room}\n'))
    parallel = hetjax.parallelize(step, cluster=small, num_microbatches=2)
    assert_same(parallel(copy_tree(state), batch), jax.jit(step)(state, batch))
    assert any("data" in dim for _, spec in parallel.plan.state_specs for dim in spec)
    assert all(s.peak_bytes <= room for s in parallel.plan.stages)


def test_nnx_state_is_split_by_the_same_rule():
    step, (model, optimizer), batch = make_nnx(dropout=0.0, tx=optax.adam(1e-3))
    plan, _ = split_plan(step, model, optimizer, batch, microbatches=2, sharding="optimizer")
    split = [path for path, spec in plan.state_specs if any("data" in dim for dim in spec)]
    assert split and all("opt_state" in path for path in split)
    assert any("data" not in str(spec) for _, spec in plan.state_specs)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_labels_are_not_taken_for_split_state_where_a_result_is_like_them(microbatches):

    def step(w, batch):
        def loss(w):
            z = jnp.tanh(jnp.tanh(batch["x"] @ w[0]) @ w[1]) @ w[2]
            return jnp.mean(jnp.square(z - batch["y"])), z

        (_, z), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return [a - 0.1 * g for a, g in zip(w, grads)], z

    w = [jnp.eye(32), jnp.eye(32), jnp.ones((32, 4))]
    batch = {"x": np.ones((8, 32), np.float32), "y": np.ones((8, 4), np.float32)}
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=microbatches, mesh=f"{REPLICAS},1")
    parallel.plan_for(w, batch)
    program, graph = parallel._in_use().bundle.program, parallel._in_use().bundle.graph
    labels = next(i for i, a in enumerate(graph.inputs) if a.path.endswith("y"))
    feeds = [f for f in program.feeds if f.argument == labels and any("data" in dim for dim in f.spec)]
    assert [f.form for f in feeds] == ["step" if microbatches == 1 else "micro"]
    assert replica_split(program, feeds[0].stage) == frozenset()
