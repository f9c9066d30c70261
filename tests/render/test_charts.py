"""Maps, tiles and charts: what they show is read back and compared with what it came from."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import HetjaxError
from hetjax.ir.graph import Aval
from hetjax.ir.program import StageMesh
from hetjax.render.cluster_map import cluster_picture
from hetjax.render.line_charts import Series, bars_picture, line_picture
from hetjax.render.memory_chart import memory_picture
from hetjax.render.roofline_chart import Point, Roof, roofline_picture
from hetjax.render.scatter_chart import scatter_picture
from hetjax.render.sharding_view import array_tiles, mesh_grid, tiles
from hetjax.render.units import human_bytes, human_count, human_rate, human_seconds, plural

TWO_SITES = """
name = "two<sites>"
[links.wan]
between = ["lyon", "oslo"]
bandwidth_gbit_s = 10
latency_ms = 12
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
"""


def parsed(picture):
    return ElementTree.fromstring(f"<div>{picture.body}</div>")


@pytest.mark.quick
def test_the_map_shows_sites_devices_and_links():
    cluster = Cluster.parse(TWO_SITES)
    picture = cluster_picture(cluster)
    tree = parsed(picture)
    assert [g.attrib["data-site"] for g in tree.iter() if "data-site" in g.attrib] == [
        "lyon",
        "oslo",
    ]
    link = next(e for e in tree.iter() if e.attrib.get("data-link") == "wan")
    assert float(link.attrib["data-bandwidth"]) == cluster.link_named("wan").bandwidth_bytes_s
    assert float(link.attrib["data-latency"]) == 12e-3
    words = "".join(tree.itertext())
    assert (
        "2 nodes of 8 x a100-80g" in words
        and "wan 1.25 GB/s, 12 ms" in words
        and "infiniband-hdr" in words
    )
    assert str(cluster) == picture.text and "two<sites>" in words


def test_a_map_of_many_nodes_stays_small():
    text = TWO_SITES.replace("count = 2", "count = 91")
    picture = cluster_picture(Cluster.parse(text))
    assert "and 696 more devices" in picture.body
    assert len(picture.body) < 30_000


SPECS = [
    ((), ()),
    (("data",), ()),
    ((), ("model",)),
    (("data",), ("model",)),
    (("data", "model"), ()),
    ((), ("model", "data")),
]


@pytest.mark.quick
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (1, 8), (2, 1)])
def test_tiles_are_where_jax_puts_them(spec, sizes):
    count = sizes[0] * sizes[1]
    mesh = StageMesh(
        "s0", "cpu", "here", (("data", sizes[0]), ("model", sizes[1])), tuple(range(count))
    )
    shape = (16, 32)
    made = jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), ("data", "model"))
    sharding = jax.sharding.NamedSharding(
        made, jax.sharding.PartitionSpec(*(d or None for d in spec))
    )
    wanted = {
        device.id: tuple(
            (s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape)
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }
    found = {d: tuple(zip(t.start, t.stop)) for t in tiles(shape, mesh, spec) for d in t.devices}
    assert found == wanted
    drawn = ElementTree.fromstring(array_tiles(Aval("f32", shape), mesh, spec))
    shown = {
        int(d): tuple(zip(map(int, e.attrib["data-start"].split()), map(int, e.attrib["data-stop"].split())))
        for e in drawn.iter() if "data-devices" in e.attrib for d in e.attrib["data-devices"].split()
    }  # fmt: skip
    assert shown == wanted


@pytest.mark.quick
def test_scalars_and_large_meshes_have_tiles_too():
    mesh = StageMesh("s0", "cpu", "here", (("data", 96), ("model", 8)), tuple(range(768)))
    assert tiles((), mesh, ())[0].devices == tuple(range(768))
    assert "and 704 more parts" in array_tiles(Aval("f32", (768, 4)), mesh, (("data", "model"), ()))
    assert "768 devices in all" in mesh_grid(mesh)


@pytest.mark.quick
def test_memory_over_time_reads_back():
    steps = [(0.0, 10.0), (0.25, 35.5), (0.75, 10.0)]
    picture = memory_picture([("s0", steps, 10.0, 40.0), ("s1", [], 3.0, 1e9)], 1.0, "memory")
    rows = {
        e.attrib["data-row"]: e.attrib for e in parsed(picture).iter() if "data-row" in e.attrib
    }
    points = [tuple(map(float, p.split(","))) for p in rows["s0"]["data-points"].split()]
    assert points == steps and float(rows["s0"]["data-capacity"]) == 40.0
    assert "peak 36 B of 40 B (88.8%)" in picture.text
    assert (
        picture.body.count("all the device has") == 1
    )  # s1 is nearly empty: its own scale, no line


@pytest.mark.quick
def test_the_roof_and_its_points():
    roofs = [Roof("a100", 312e12, 2e12, "bf16"), Roof("v100", 15.7e12, 0.9e12, "f32")]
    points = [
        Point("s0/forward", "a100", 4e9, 1e7, 2e-5, 0.5),
        Point("s1/forward", "v100", 1e9, 2e8, 1e-3, 0.4),
    ]
    picture = roofline_picture(roofs, points, "roof")
    named = {
        e.attrib["data-name"]: e.attrib for e in parsed(picture).iter() if "data-name" in e.attrib
    }
    assert {n: float(a["data-flops"]) / float(a["data-seconds"]) for n, a in named.items()} == {
        "s0/forward": pytest.approx(2e14), "s1/forward": pytest.approx(1e12)
    }  # fmt: skip
    # 5 FLOP a byte times 0.9 TB/s is 4.5 TFLOP/s, of which 1 is 22 %.
    assert "s1/forward: 1 TFLOP/s, 22% of its roof" in picture.text


@pytest.mark.quick
def test_outliers_bear_their_names():
    pairs = [
        ("a", 1.0, 1.05),
        ("b", 2.0, 2.0),
        ("worst", 1.0, 4.0),
        ("bad", 3.0, 2.0),
        ("nothing", 0.0, 1.0),
    ]
    picture = scatter_picture(pairs, "p")
    outliers = [
        e.attrib["data-name"] for e in parsed(picture).iter() if e.attrib.get("data-outlier")
    ]
    assert sorted(outliers) == ["bad", "worst"]
    assert (
        ">worst -75%<" in picture.body
        and ">bad +50%<" in picture.body
        and ">b " not in picture.body
    )
    assert "4 points, median error 50.0%" in picture.text


@pytest.mark.quick
def test_lines_and_bars_hold_their_numbers(tmp_path):
    lines = line_picture(
        [Series("x", [(0, 3.0), (1, 1.5)]), Series("y", [(0, 2.0), (1, 2.0)])], "t", "step", "loss"
    )
    data = {
        e.attrib["data-series"]: e.attrib["data-points"]
        for e in parsed(lines).iter()
        if "data-series" in e.attrib
    }
    assert data == {"x": "0,3.0 1,1.5", "y": "0,2.0 1,2.0"}
    bars = bars_picture([("one", 1.0), ("two", 2.5)], "t", human_seconds, lines=[("bound", 0.5)])
    values = {
        e.attrib["data-name"]: float(e.attrib["data-value"])
        for e in parsed(bars).iter()
        if "data-value" in e.attrib
    }
    assert values == {"one": 1.0, "two": 2.5, "bound": 0.5}
    bars.save(tmp_path / "bars.svg")
    ElementTree.parse(tmp_path / "bars.svg")
    with pytest.raises(HetjaxError, match=r"use a name in \.svg, \.html or \.txt"):
        bars.save(tmp_path / "bars.png")


@pytest.mark.quick
def test_numbers_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1024, 3 * 2**20, 5 * 2**40, -2048)] == [
        "0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5.0 TiB", "-2.0 KiB",
    ]  # fmt: skip
    assert [human_seconds(s) for s in (0, 2e-9, 1.5e-6, 0.0123456, 2, 90, 900, 7200)] == [
        "0 s", "2 ns", "1.5 us", "12.35 ms", "2 s", "90 s", "15 min", "2 h",
    ]  # fmt: skip
    assert human_rate(3.12e14, "FLOP/s") == "312 TFLOP/s" and human_rate(5, "B/s") == "5 B/s"
    assert (
        human_count(6606) == "6,606"
        and plural(1, "op") == "1 op"
        and plural(2, "leaf", "leaves") == "2 leaves"
    )


@given(st.text(max_size=30))
def test_any_name_stays_text(name):
    picture = bars_picture([(name, 1.0)], name, str)
    clean = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "", picture.body)
    ElementTree.fromstring(clean)
