"""Collectives against values computed by hand on clusters with round numbers."""

import pytest

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, Link, Node, Site
from hetjax.ir.errors import PlanError
from hetjax.passes.cost.collectives import COLLECTIVES, collective_price, levels

T4 = presets.KINDS["t4"]
FAST = Link("fast", 100e9, 1e-6)
SLOW = Link("slow", 10e9, 10e-6)
WAN = Link("wan", 1e9, 1e-3, between=("a", "b"))


def cluster(nodes_per_site: int = 2, devices: int = 4, slow: Link = SLOW) -> Cluster:
    sites = (Site("a", "slow"), Site("b", "slow"))
    nodes = tuple(Node(f"{s.name}{i}", "t4", devices, s.name, "fast") for s in sites for i in range(nodes_per_site))
    return Cluster("c", (T4,), sites, nodes, (FAST, slow, WAN))


def seconds(collective, devices, nbytes, **options):
    return collective_price(cluster(), collective, devices, nbytes, **options).seconds


@pytest.mark.quick
def test_a_ring_inside_a_node():
    # 2 (p - 1) steps of n / p bytes, each with its latency.
    expected = 6 * (1e-6 + 0.25e9 / 100e9)
    assert seconds("all-reduce", range(4), 1e9, algorithm="ring") == pytest.approx(expected)
    assert seconds("all-gather", range(4), 1e9, algorithm="ring") == pytest.approx(expected / 2)
    assert seconds("reduce-scatter", range(4), 1e9, algorithm="ring") == pytest.approx(expected / 2)


def test_a_tree_is_better_for_small_messages():
    assert seconds("all-reduce", range(4), 8, algorithm="tree") == pytest.approx(4 * 1e-6, rel=1e-3)
    small = collective_price(cluster(), "all-reduce", range(4), 8)
    large = collective_price(cluster(), "all-reduce", range(4), 1e9)
    assert (small.algorithm, large.algorithm) == ("tree", "ring")


def test_a_hierarchy_sends_less_over_the_slow_link():
    # Inside: 2 x 3 steps of n/4 at 100 GB/s. Between two nodes: 2 steps in which each of four devices
    # sends n/8, n/2 a node, at 10 GB/s.
    inside = 6 * (1e-6 + 0.25e9 / 100e9)
    between = 2 * (10e-6 + 0.5e9 / 10e9)
    assert seconds("all-reduce", range(8), 1e9, algorithm="hierarchical") == pytest.approx(inside + between)
    flat = 14 * (10e-6 + 0.125e9 / 10e9)
    assert seconds("all-reduce", range(8), 1e9, algorithm="ring") == pytest.approx(flat)
    assert collective_price(cluster(), "all-reduce", range(8), 1e9).algorithm == "hierarchical"


def test_three_levels():
    inside = 6 * (1e-6 + 0.25e9 / 100e9)
    nodes = 2 * (10e-6 + 0.5e9 / 10e9)
    # Eight devices of a site carry n/16 each to the other one, n/2 in all, at 1 GB/s.
    sites = 2 * (1e-3 + 0.5e9 / 1e9)
    assert [level.size for level in levels(cluster(), range(16))] == [4, 2, 2]
    got = seconds("all-reduce", range(16), 1e9, algorithm="hierarchical")
    assert got == pytest.approx(inside + nodes + sites)


def test_groups_beside_each_other_share_a_nodes_link():
    # Device i of one node with device i of the other: alone, and with three such groups beside.
    alone = seconds("all-reduce", [0, 4], 1e9, algorithm="ring")
    shared = seconds("all-reduce", [0, 4], 1e9, beside=4, algorithm="ring")
    assert alone == pytest.approx(2 * (10e-6 + 0.5e9 / 10e9))
    assert shared == pytest.approx(2 * (10e-6 + 2e9 / 10e9))
    # Inside a node every device has a link of its own.
    assert seconds("all-reduce", range(4), 1e9, beside=4) == seconds("all-reduce", range(4), 1e9)


def test_half_duplex_links_carry_both_directions():
    half = cluster(slow=Link("slow", 10e9, 10e-6, duplex="half"))
    price = collective_price(half, "all-reduce", [0, 4], 1e9, algorithm="ring")
    assert price.seconds == pytest.approx(2 * (10e-6 + 1e9 / 10e9))


def test_an_all_to_all_crosses_with_every_pair():
    # Inside: 3 messages of n/8. Between: each node's four devices send n/8 to each of four: 2n.
    expected = 3 * (1e-6 + 0.125e9 / 100e9) + (10e-6 + 2e9 / 10e9)
    assert seconds("all-to-all", range(8), 1e9) == pytest.approx(expected)


def test_a_broadcast_takes_the_better_of_tree_and_ring():
    assert collective_price(cluster(), "broadcast", range(4), 8).algorithm == "tree"
    assert collective_price(cluster(), "broadcast", [*range(4)], 1e9).seconds == pytest.approx(
        6 * (1e-6 + 0.25e9 / 100e9)
    )


def test_a_bandwidth_curve_counts_at_the_size_of_a_step():
    curved = Link("slow", 10e9, 0.0, curve=((1_000, 1e9), (1_000_000_000, 10e9)))
    price = collective_price(cluster(slow=curved), "all-reduce", [0, 4], 2_000, algorithm="ring")
    assert price.seconds == pytest.approx(2 * 1_000 / 1e9)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_device_or_no_bytes_cost_nothing(collective):
    assert collective_price(cluster(), collective, [3], 1e9).seconds == 0
    assert collective_price(cluster(), collective, [3, 4], 0).algorithm == "none"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_bytes_never_cost_less(collective):
    prices = [seconds(collective, range(16), 10.0**e) for e in range(1, 11)]
    assert prices == sorted(prices)


def test_unknown_names_are_told_with_the_nearest():
    with pytest.raises(PlanError, match="did you mean 'all-reduce'"):
        collective_price(cluster(), "allreduce", [0, 1], 1)
    with pytest.raises(PlanError, match="did you mean 'ring'"):
        collective_price(cluster(), "all-reduce", [0, 1], 1, algorithm="rings")
