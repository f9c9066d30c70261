"""Prices and memory of real programs: against XLA's own analysis, against limits, by hand."""

import dataclasses
import functools
import json

import jax
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from flax import linen as nn
from flax.training import train_state

import hetjax
from hetjax.cli.main import cli
from hetjax.demo import linen_gpt
from hetjax.demo.training import Config
from hetjax.ir import presets
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.program import StageMesh
from hetjax.ir.text import print_bundle
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.cost.memory import fragment_memory, stage_memory
from hetjax.passes.cost.program_price import axis_group, fragment_price
from hetjax.passes.cost.roofline import Efficiency
from hetjax.runtime.compiler import compile_program

TWO_SITES = """
name = "two"
[[sites]]
name = "a"
nodes = [{ kind = "KIND", devices = 4 }]
[[sites]]
name = "b"
nodes = [{ kind = "KIND", devices = 4 }]
[links.wan]
between = ["a", "b"]
bandwidth_gb_s = 100
latency_us = 1
"""
# A kind whose elementwise arithmetic is free, so that products alone count.
PRODUCTS_ONLY = """
[kinds.box]
platform = "cuda"
memory_gb = 80
memory_bandwidth_gb_s = 1000
peak_flops = { f32 = 1e30, tf32 = 1e14 }
"""


def two_sites(kind: str, extra: str = "") -> Cluster:
    text = TWO_SITES.replace("KIND", kind) + extra
    if extra:
        text = text.replace(f'"{kind}", devices', f'"{kind}", link = "pcie3-x16", devices')
    return Cluster.parse(text)


class Net(nn.Module):
    width: int = 64
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            h = nn.Dense(4 * self.width, dtype=self.dtype, name=f"up_{i}")(x)
            x = x + nn.Dense(self.width, dtype=self.dtype, name=f"down_{i}")(nn.gelu(h))
        return nn.Dense(1, dtype=self.dtype)(x)


def step(state, batch):
    def loss(params):
        return ((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


@functools.cache
def bundle_of(cluster=None, dtype="float32", rows=4096, width=2048, **options):
    """Returns a lowered step; only shapes exist, so that it can be large enough to be worth a cut."""
    net = Net(width, dtype)
    batch = {
        "x": jax.ShapeDtypeStruct((rows, width), np.float32),
        "y": jax.ShapeDtypeStruct((rows, 1), np.float32),
    }

    def create(x):
        params = net.init(jax.random.key(0), x)
        return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3))

    state = jax.eval_shape(create, batch["x"])
    options = {"num_stages": 2, "num_microbatches": 4} | options
    return hetjax.parallelize(step, cluster=cluster, **options).lower(state, batch)._entry.bundle


@pytest.fixture(scope="module")
def local():
    return bundle_of(mesh="2,2", rows=32, width=64)


def test_fragments_take_and_give_what_xla_says(local):
    compiled, _ = compile_program(local.program, jax.devices())
    for fragment in local.program.fragments:
        ours = fragment_memory(local.program, fragment)
        analysis = compiled[fragment.name].executable.memory_analysis()
        # XLA adds a table of pointers to a tuple of results, and drops arguments nobody reads.
        table = 8 * (len(fragment.outputs) + 1) * 4
        assert 0 <= analysis.output_size_in_bytes - ours.output_bytes <= table, fragment.name
        assert 0 <= ours.argument_bytes - analysis.argument_size_in_bytes <= table, fragment.name


def gpt_bundle(**options):
    """Returns the demo's GPT, lowered from types alone."""
    config = Config(vocab_size=256, length=64, width=64, num_layers=4)
    state = jax.eval_shape(lambda: linen_gpt.create(config, optax.adam(1e-3)))
    batch = {k: jax.ShapeDtypeStruct((16, 64), np.int32) for k in ("tokens", "targets")}
    options = {"num_stages": 2, "num_microbatches": 4} | options
    return hetjax.parallelize(linen_gpt.train_step, **options).lower(state, batch)._entry.bundle


# What a call takes, gives and needs meanwhile, against XLA's account of it; and a stage's peak with
# XLA's temporaries in place of ours. XLA for CPU copies the operands of some products, which no
# accelerator does and which is not counted.
CALL, PEAK = 0.15, 0.10


@pytest.mark.parametrize("model", ["net", "gpt"])
def test_memory_agrees_with_the_compiled_fragments(local, model):
    bundle = local if model == "net" else gpt_bundle(mesh="2,1")
    program = bundle.program
    compiled, _ = compile_program(program, jax.devices())
    temporaries = [0] * len(program.meshes)
    for fragment in program.fragments:
        ours = fragment_memory(program, fragment)
        xla = compiled[fragment.name].executable.memory_analysis()
        if fragment.per_microbatch:
            temporaries[fragment.stage] = max(temporaries[fragment.stage], xla.temp_size_in_bytes)
        whole = xla.argument_size_in_bytes + xla.output_size_in_bytes + xla.temp_size_in_bytes
        mine = ours.argument_bytes + ours.output_bytes + ours.temporary_bytes
        assert mine == pytest.approx(whole, rel=CALL, abs=4096), fragment.name
    estimate = estimate_program(bundle)
    for memory, temporary in zip(estimate.memory, temporaries):
        measured = dataclasses.replace(memory, temporaries=temporary).peak_bytes
        assert memory.peak_bytes == pytest.approx(measured, rel=PEAK)


def test_state_and_gradients_of_all_stages_are_the_models(local):
    memory = [stage_memory(local.graph, local.program, s, 2) for s in range(2)]
    whole = [stage_memory(b.graph, b.program, s, 2) for b in [bundle_of(mesh="1,1", rows=32, width=64)] for s in range(2)]
    graph = local.graph
    params = [a for a in graph.inputs if a.role == "state" and "opt_state" not in a.path]
    nbytes = sum(graph.avals[a.ref].nbytes for a in params)
    # A scalar that both stages read is held twice.
    assert sum(m.parameters for m in whole) == pytest.approx(nbytes, abs=64)
    assert sum(m.optimizer for m in whole) == pytest.approx(2 * nbytes, abs=64)
    assert sum(m.gradients for m in whole) == pytest.approx(nbytes, abs=64)
    # Kernels are split in two by the model axis; biases and such are not.
    assert sum(m.parameters for m in memory) < 0.6 * nbytes
    assert memory[0].peak_bytes == (
        memory[0].parameters + memory[0].optimizer + memory[0].gradients
        + max(2 * memory[0].activations + memory[0].transfers + memory[0].temporaries, memory[0].update)
    )  # fmt: skip


def test_an_estimate_is_above_its_bound_and_follows_the_task_lists(local):
    estimate = estimate_program(local)
    assert 0 < estimate.lower_bound_s <= estimate.iteration_s
    assert 0 <= estimate.bubble < 1
    ran = [span.task for spans in estimate.timeline.spans for span in spans]
    computes = [t for tasks in local.program.tasks for t in tasks if t.kind not in ("send", "recv")]
    assert ran == computes
    assert estimate.over == () and estimate.emulated == ()
    assert dict(estimate.sources)["op costs"] == "analytic"


def test_work_by_hand_at_ideal_efficiency():
    ideal = {"box": Efficiency(1.0, 0.0, 1e9, 0.0)}
    bundle = bundle_of(two_sites("box", PRODUCTS_ONLY), mesh="1,1")
    program = bundle.program
    prices = {f.name: fragment_price(program, f, bundle.cluster, ideal) for f in program.fragments}
    # Two operations per weight and row forward; backward twice that, less the input gradient of the
    # very first layer. 1024 rows a microbatch.
    width, rows = 2048, 1024
    weights, first = 2 * 2 * width * 4 * width + width, width * 4 * width
    forward = sum(p.seconds for name, p in prices.items() if name.endswith("forward"))
    backward = sum(p.seconds for name, p in prices.items() if name.endswith("backward"))
    assert forward == pytest.approx(2 * rows * weights / 1e14, rel=1e-6)
    assert backward == pytest.approx((4 * rows * weights - 2 * rows * first) / 1e14, rel=0.02)


def test_a_slow_link_shows_and_a_faster_device_helps():
    near = bundle_of(two_sites("a100-80g"), mesh="1,1")
    far_text = TWO_SITES.replace("latency_us = 1", "latency_ms = 50").replace("KIND", "a100-80g")
    fast, far = estimate_program(near), estimate_program(near.replace(cluster=Cluster.parse(far_text)))
    # Four microbatches of 1f1b on two stages wait for the link there and back at least twice.
    assert far.iteration_s > fast.iteration_s + 4 * 0.05 - 1e-3
    assert far.lower_bound_s > fast.lower_bound_s + 2 * 0.05 - 1e-3
    assert far.exposed_comm_s > fast.exposed_comm_s
    old = estimate_program(bundle_of(two_sites("v100-16g"), mesh="1,1"))
    assert sum(old.timeline.busy_s) > sum(fast.timeline.busy_s)


def test_tensor_parallel_and_batch_sums_cost_collectives():
    cluster = two_sites("t4")
    alone = estimate_program(bundle_of(cluster, mesh="1,1")).fragments
    model = estimate_program(bundle_of(cluster, mesh="1,4")).fragments
    data = estimate_program(bundle_of(cluster, mesh="4,1")).fragments
    assert all(p.collective_s == 0 for p in alone.values())
    assert model["s0/forward"].collective_s > 0
    # Split over data, the forward needs no exchange; the gradients are summed up.
    assert data["s0/forward"].collective_s == 0
    assert data["s0/backward"].collective_s > 0


def test_a_dtype_is_emulated_and_said_or_refused_with_the_stage():
    v100 = two_sites("v100-16g")
    bundle = bundle_of(v100, dtype="bfloat16", mesh="1,1")
    assert set(estimate_program(bundle).emulated) == {(0, "bf16"), (1, "bf16")}
    bare = dataclasses.replace(presets.KINDS["v100-16g"], emulated_dtypes=())
    bundle = bundle.replace(cluster=dataclasses.replace(v100, kinds=(bare,)))
    with pytest.raises(PlanError, match=r"stage 0, dot_general \(.*up_0.*has no bf16"):
        estimate_program(bundle)


def test_what_does_not_fit_is_told_with_the_numbers():
    tiny = '[kinds.tiny]\nlike = "t4"\nmemory_bytes = 100_000_000\n'
    estimate = estimate_program(bundle_of(two_sites("tiny", tiny), mesh="1,1"))
    assert len(estimate.over) == 2
    assert "stage 0 needs" in estimate.over[0] and "which has 0.1 GB" in estimate.over[0]


def test_groups_along_an_axis():
    mesh = StageMesh("s0", "t4", "a", (("data", 2), ("model", 3)), (10, 11, 12, 13, 14, 15))
    assert axis_group(mesh, "model") == ((10, 11, 12), 2)
    assert axis_group(mesh, "data") == ((10, 13), 3)


def test_a_bundle_without_program_is_refused(local):
    with pytest.raises(PlanError, match="an estimate needs"):
        estimate_program(local.replace(program=None))


def test_the_command_estimates_a_complete_bundle(tmp_path):
    bundle = bundle_of(two_sites("v100-16g"), dtype="bfloat16", mesh="1,1")
    (tmp_path / "step.hj").write_text(print_bundle(bundle))
    words = ["simulate", str(tmp_path / "step.hj"), "--trace", str(tmp_path / "trace.json")]
    facts = json.loads(CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False).stdout)
    expected = estimate_program(bundle)
    assert facts["iteration_s"] == pytest.approx(expected.iteration_s)
    assert facts["peak_bytes"] == list(expected.peak_bytes)
    assert facts["lower_bound_s"] <= facts["iteration_s"]
    assert facts["emulated"] == [{"stage": s, "dtype": "bf16"} for s in (0, 1)]
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 16
    said = CliRunner().invoke(cli, words, standalone_mode=False).stdout
    assert "peak memory" in said and "emulated: bf16 on stage 1" in said
