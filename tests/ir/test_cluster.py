"""Clusters: devices, groups, links, and what makes a description wrong."""


import pytest

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, Link, Node, Site
from hetjax.ir.errors import ClusterError

TWO_SITES = """
name = "two"

[[sites]]
name = "lyon"
link = "infiniband-hdr"
[[sites.nodes]]
kind = "a100-80g"
devices = 8
count = 2

[[sites]]
name = "oslo"
[[sites.nodes]]
kind = "v100-16g"
devices = 4

[links.wan]
between = ["lyon", "oslo"]
bandwidth_gbit_s = 10
latency_ms = 10
"""


@pytest.fixture
def two() -> Cluster:
    return Cluster.parse(TWO_SITES)


@pytest.mark.quick
def test_devices_are_numbered_in_node_order(two):
    assert two.num_devices == 20
    assert [d.index for d in two.devices] == list(range(20))
    assert (two.devices[8].node, two.devices[8].site, two.devices[8].kind) == ("lyon-1", "lyon", "a100-80g")
    assert two.kind_of(16) == presets.KINDS["v100-16g"]


def test_groups_are_the_largest_of_one_site_and_kind(two):
    lyon, oslo = two.groups()
    assert (lyon.site, lyon.kind, lyon.devices) == ("lyon", "a100-80g", tuple(range(16)))
    assert lyon.nodes == (tuple(range(8)), tuple(range(8, 16)))
    assert (oslo.site, oslo.devices, oslo.num_devices) == ("oslo", (16, 17, 18, 19), 4)


def test_link_between_devices_follows_where_they_are(two):
    assert two.link(0, 7).name == "nvlink3"
    assert two.link(0, 8).name == "infiniband-hdr"
    assert two.link(8, 19).name == two.link(19, 8).name == "wan"
    assert two.site_link("lyon", "oslo") == two.link(0, 16)
    assert two.transfer_s(3, 3, 1e9) == 0
    # 1.25 MB at 1.25 GB/s is 1 ms, after 10 ms on the way.
    assert two.transfer_s(0, 16, 1.25e6) == pytest.approx(11e-3)


def test_a_pair_can_be_singled_out_of_a_link_that_joins_many():
    sites = tuple(Site(n) for n in "abc")
    nodes = tuple(Node(f"n{n}", "t4", 1, n, "pcie3-x16") for n in "abc")
    hub = Link("hub", 1e9, 1e-3, between=("a", "b", "c"))
    short = Link("short", 5e9, 1e-4, between=("a", "c"))
    cluster = Cluster("c", (presets.KINDS["t4"],), sites, nodes, (short, hub, presets.LINKS["pcie3-x16"]))
    assert [cluster.link(*p).name for p in ((0, 1), (1, 2), (0, 2))] == ["hub", "hub", "short"]


def test_bandwidth_curve_is_linear_in_the_logarithm_of_size():
    link = Link("l", 9e9, 1e-6, curve=((1000, 1e9), (100_000, 3e9)))
    assert link.bandwidth(10) == 1e9
    assert link.bandwidth(10_000) == pytest.approx(2e9)
    assert link.bandwidth(1e9) == 3e9
    assert link.transfer_s(10_000) == pytest.approx(1e-6 + 10_000 / 2e9)


def test_wires_are_shared_by_what_shares_a_bandwidth(two):
    # Inside a node each device has its own port; between nodes a node's devices share one.
    assert not set(two.wires(0, 1)) & set(two.wires(2, 3))
    assert set(two.wires(0, 1)) & set(two.wires(0, 2))
    assert two.wires(0, 8) == two.wires(1, 9)
    assert not set(two.wires(0, 8)) & set(two.wires(8, 0))
    assert two.wires(0, 16) == two.wires(9, 17)
    assert two.wires(0, 16) != two.wires(16, 0)


def test_half_duplex_and_shared_uplinks_have_one_wire():
    text = TWO_SITES + 'duplex = "half"\n'
    half = Cluster.parse(text)
    assert half.wires(0, 16) == half.wires(16, 0)
    bern = """
[[sites]]
name = "bern"
nodes = [{ kind = "t4", devices = 1 }]
"""
    wan = '[links.{0}]\nlike = "10gbe"\nbetween = ["bern", "{1}"]\nuplink = "up"\nduplex = "half"\n'
    three = Cluster.parse(TWO_SITES + bern + wan.format("x", "lyon") + wan.format("y", "oslo"))
    assert three.link(0, 20) != three.link(16, 20)
    assert three.wires(0, 20) == three.wires(20, 16)


def test_a_cluster_that_makes_no_sense_is_refused_with_every_reason():
    t4 = presets.KINDS["t4"]
    with pytest.raises(ClusterError) as caught:
        Cluster(
            "odd", (t4, presets.KINDS["l4"]), (Site("a"), Site("b")),
            (Node("n", "t4", 1, "b", "pcie3-x16"), Node("m", "t5", 0, "a", "")), (),
        )  # fmt: skip
    found = "\n".join(caught.value.problems)
    for said in (
        "order of their sites", "unknown device kind 't5'", "at least one device, not 0", "unknown link 'pcie3-x16'",
        "no node has kind 'l4'", "'a' and 'b' have no link between them",
    ):  # fmt: skip
        assert said in found


def test_unknown_names_are_told_with_the_nearest(two):
    with pytest.raises(ClusterError, match="did you mean 'a100-80g'"):
        two.kind("a100-80")
    with pytest.raises(ClusterError, match="did you mean 'wan'"):
        two.link_named("wam")


def test_the_summary_names_sites_devices_and_links(two):
    text = str(two)
    assert "20 devices in 2 sites" in text
    assert "lyon-0: 8 x a100-80g (80 GB), joined by nvlink3 300 GB/s, 3 us" in text
    assert "lyon - oslo: wan 1.25 GB/s, 10 ms" in text
