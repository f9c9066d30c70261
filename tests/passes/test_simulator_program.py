"""A traced step's own program on the simulator, and the runtime's order against the simulator's."""

import dataclasses

import pytest

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Aval
from hetjax.ir.program import Fragment, Piece, Port, Program, StageMesh
from hetjax.passes.bounds import lower_bound
from hetjax.passes.insert_reshards import find_reshards
from hetjax.passes.schedule_tasks import schedule_tasks
from hetjax.passes.simulator_program import pipeline_costs, program_transfers, simulate_program
from hetjax.runtime.executor import merge_tasks

TOML = """
name = "two sites"
[[sites]]
name = "a"
[[sites.nodes]]
kind = "box"
devices = 2
link = "inside"
[[sites]]
name = "b"
[[sites.nodes]]
kind = "box"
devices = 2
link = "inside"
[links.inside]
bandwidth_gb_s = 10
latency_us = 1
[links.wan]
between = ["a", "b"]
bandwidth_bytes_s = 1_000_000
latency_ms = 50
DUPLEX
[kinds.box]
like = "cpu"
"""


def program(num_microbatches=4):
    """Returns a step cut in two: activation 1 goes there, its gradient 2 comes back, both f32[8,16]."""
    def port(ref, form="micro"):
        return Port(ref, form, ((), ()))

    fragments = (
        Fragment("s0/forward", 0, "forward", 0, (), (port(0),), (port(1),)),
        Fragment("s0/backward", 0, "backward", 0, (), (port(2),), (port(3, "sum"),)),
        Fragment("s0/update0", 0, "update", 0, (), (port(3, "sum"),), ()),
        Fragment("s1/forward", 1, "forward", 0, (), (port(1),), (port(4),)),
        Fragment("s1/backward", 1, "backward", 0, (), (port(4),), (port(2), port(5, "sum"))),
        Fragment("s1/update0", 1, "update", 0, (), (port(5, "sum"),), ()),
    )
    meshes = tuple(StageMesh(f"s{s}", "cpu", "local", (("data", 1),), (s,)) for s in range(2))
    avals = (Aval("f32", (8, 16)),) * 6
    made = Program("step", num_microbatches, "", meshes, avals, avals, fragments)
    made = made.replace(reshards=tuple(find_reshards(made)))
    return made.replace(tasks=schedule_tasks(made, "1f1b"), schedule="1f1b")


@pytest.fixture(scope="module")
def made():
    return program()


def two_sites(made, duplex="full"):
    """Returns a cluster of two far sites, and the program with one stage on each."""
    cluster = Cluster.parse(TOML.replace("DUPLEX", f'duplex = "{duplex}"'))
    meshes = tuple(dataclasses.replace(m, devices=(2 * i,)) for i, m in enumerate(made.meshes))
    return cluster, made.replace(meshes=meshes)


def test_simulated_order_is_the_order_that_runs(made):
    cluster, placed = two_sites(made)
    line = simulate_program(placed, cluster, {f.name: 1.0 for f in made.fragments})
    merged = merge_tasks(placed)
    for s, spans in enumerate(line.spans):
        runs = [t for t in merged if t.stage == s and t.kind not in ("send", "recv")]
        assert [span.task for span in spans] == runs
    # And in time: where the simulator starts a task after another's end because it reads from it, so does the runtime.
    position = {task: i for i, task in enumerate(merged)}
    for task in (t for t in merged if t.kind == "recv"):
        send = next(t for t in merged if t.kind == "send" and (t.work, t.microbatch) == (task.work, task.microbatch))
        assert position[send] < position[task]


def test_what_crosses_is_priced_on_the_wire(made):
    cluster, placed = two_sites(made)
    prices = program_transfers(placed, cluster)
    crossing = [r for r in placed.reshards if r.form == "micro"]
    assert crossing
    for r in crossing:
        assert prices[r.name].latency_s == 0.05
        assert prices[r.name].serialisation_s == pytest.approx(r.nbytes / 1e6)
    costs = pipeline_costs(placed, cluster, {f.name: 1.0 for f in made.fragments})
    there = sum(r.nbytes for r in crossing if r.source == 0) / 1e6
    back = sum(r.nbytes for r in crossing if r.source == 1) / 1e6
    assert costs.serialisation_s == (pytest.approx(max(there, back)),)
    assert costs.latency_s == (0.05,)
    line = simulate_program(placed, cluster, {f.name: 1.0 for f in made.fragments})
    assert line.makespan_s >= lower_bound(costs).chain_s - 1e-9


def test_pieces_add_up_per_wire(made):
    """Two halves from two devices of one node share the wire between the sites, not their own ports."""
    cluster, placed = two_sites(made)
    r = next(r for r in placed.reshards if r.form == "micro" and len(placed.micro_avals[r.ref].shape) == 2)
    rows, columns = placed.micro_avals[r.ref].shape
    halves = (Piece(0, 2, (0, 0), (rows // 2, columns)), Piece(1, 3, (rows // 2, 0), (rows, columns)))
    split = placed.replace(reshards=tuple(dataclasses.replace(x, pieces=halves) if x is r else x for x in placed.reshards))
    price = program_transfers(split, cluster)[r.name]
    assert price.serialisation_s == pytest.approx(r.nbytes / 1e6)
    within = tuple(dataclasses.replace(p, target=1 - p.source) for p in halves)
    near = placed.replace(reshards=tuple(dataclasses.replace(x, pieces=within) if x is r else x for x in placed.reshards))
    assert program_transfers(near, cluster)[r.name].serialisation_s == pytest.approx(r.nbytes / 2 / 10e9)


def test_half_duplex_is_one_line(made):
    cluster, placed = two_sites(made, "half")
    costs = pipeline_costs(placed, cluster, {f.name: 1.0 for f in made.fragments})
    assert costs.route(0, 0) == costs.route(0, 1)
    cluster, placed = two_sites(made)
    costs = pipeline_costs(placed, cluster, {f.name: 1.0 for f in made.fragments})
    assert costs.route(0, 0) != costs.route(0, 1)


def test_a_fragment_without_a_time_is_named(made):
    cluster, placed = two_sites(made)
    with pytest.raises(PlanError, match="no time is given for fragment"):
        simulate_program(placed, cluster, {})


def test_program_lists_hide_the_link(made):
    """With predicted times and a slow link, virtual-1f1b gives stage 0 warm-ups that 1f1b does not."""
    cluster, placed = two_sites(made)
    placed = placed.replace(num_microbatches=12)
    work_s = {"s0/forward": 0.01, "s0/backward": 0.02, "s1/forward": 0.01, "s1/backward": 0.02,
              "s0/update0": 0.0, "s1/update0": 0.0}
    times = {}
    for kind in ("1f1b", "virtual-1f1b", "auto"):
        lists = schedule_tasks(placed, kind, [0.03, 0.03], cluster)
        times[kind] = simulate_program(placed.replace(tasks=lists), cluster, work_s).makespan_s
    assert times["virtual-1f1b"] < 0.65 * times["1f1b"]
    assert times["auto"] <= times["virtual-1f1b"]
    given = schedule_tasks(placed, "1f1b", [0.03, 0.03], cluster, warmups=(5, 1))
    assert [str(t) for t in given[0] if t.kind in "FB"][:6] == ["F0", "F1", "F2", "F3", "F4", "B0"]


def test_split_schedules_need_split_fragments(made):
    with pytest.raises(PlanError, match="backward fragments are whole; use gpipe, 1f1b"):
        schedule_tasks(made, "zb-h1")
