"""Clusters as TOML: the round trip, and everything wrong told at once by line and key."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, DeviceKind, Link, Node, Site
from hetjax.ir.errors import ClusterError, ParseError
from hetjax.ir.toml_lines import key_lines, line_of

TWO_SITES = """\
name = "two"   # a comment

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
name = "big"
kind = "mine"
devices = 4

[links.wan]
between = [
  "lyon",  # the south
  "oslo",
]
bandwidth_gbit_s = 10
latency_ms = 10
curve_gb_s = [[1024, 0.1], [1048576, 1.2]]

[kinds.mine]
like = "v100-16g"
memory_gb = 32
peak_tflops = { f16 = 112 }
"""

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
positive = st.floats(1e-3, 1e18, allow_nan=False)
sources = st.text(max_size=12)
dtypes = st.lists(st.sampled_from(["f32", "f64", "bf16", "f16", "tf32", "i8"]), min_size=1, unique=True)


@st.composite
def clusters(draw):
    words = draw(st.lists(names, min_size=14, max_size=14, unique=True))
    kinds = [presets.KINDS["t4"], presets.KINDS["tpu-v5e"]]
    for _ in range(draw(st.integers(0, 2))):
        peaks = tuple((d, draw(positive)) for d in draw(dtypes))
        platform = draw(st.sampled_from(["cpu", "cuda", "rocm", "tpu"]))
        emulated = tuple(draw(st.lists(st.sampled_from(["f8e5m2", "f4e2m1fn"]), unique=True)))
        kind = DeviceKind(
            words.pop(), platform, draw(st.integers(1, 10**13)), draw(positive), peaks, emulated,
            draw(sources), tuple(draw(st.lists(names, max_size=2))), draw(sources),
        )  # fmt: skip
        kinds.append(kind)

    def link(between=()):
        sizes = sorted(draw(st.sets(st.integers(1, 10**9), max_size=3)))
        return Link(
            words.pop(), draw(positive), draw(st.floats(0, 10)), between,
            draw(st.sampled_from(["full", "half"])), tuple((n, draw(positive)) for n in sizes),
            draw(sources), draw(sources),
        )  # fmt: skip

    inner = [presets.LINKS["nvlink3"], link()]
    sites, nodes, links = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 2))
        site = Site(words.pop(), draw(st.sampled_from(inner)).name if count == 2 else "")
        sites.append(site)
        for k in range(count):
            kind, joint = draw(st.sampled_from(kinds)), draw(st.sampled_from(inner))
            nodes.append(Node(f"{site.name}/{k}", kind.name, draw(st.integers(1, 9)), site.name, joint.name))
    if len(sites) > 1:
        links.append(link(tuple(s.name for s in sites)))
    used = {p.link for p in (*sites, *nodes)}
    links += [k for k in inner if k.name in used]
    kinds = [k for k in kinds if k.name in {n.kind for n in nodes}]
    return Cluster(draw(sources), tuple(kinds), tuple(sites), tuple(nodes), tuple(links))


@given(clusters())
@settings(max_examples=150, deadline=None)
def test_toml_reads_back_equal(cluster):
    again = Cluster.parse(cluster.to_toml())
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert again.hash == cluster.hash
    assert again.to_toml() == cluster.to_toml()


@pytest.mark.quick
def test_a_file_is_read_with_presets_units_and_own_kinds(tmp_path):
    (tmp_path / "c.toml").write_text(TWO_SITES)
    cluster = Cluster.from_toml(tmp_path / "c.toml")
    mine, wan = cluster.kind("mine"), cluster.link_named("wan")
    assert mine.memory_bytes == 32 * 10**9
    assert (mine.peak("f16"), mine.peak("f32")) == (112e12, 15.7e12)
    assert (wan.bandwidth_bytes_s, wan.latency_s) == (1.25e9, 0.01)
    assert wan.curve == ((1024, 1e8), (1048576, 1.2e9))
    assert [n.name for n in cluster.nodes] == ["lyon-0", "lyon-1", "big"]
    # What is not said: a node of an own kind is joined as the preset it is like.
    assert [n.link for n in cluster.nodes] == ["nvlink3", "nvlink3", "nvlink2"]


def test_sources_do_not_count_in_the_hash_and_everything_else_does():
    cluster = Cluster.parse(TWO_SITES)
    noted = Cluster.parse(TWO_SITES + 'source = "our invoice"\n')
    slower = Cluster.parse(TWO_SITES.replace("latency_ms = 10", "latency_ms = 11"))
    assert noted != cluster
    assert noted.hash == cluster.hash
    assert slower.hash != cluster.hash


def wrong(text: str) -> list[str]:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(text, "c.toml")
    return list(caught.value.problems)


@pytest.mark.quick
def test_every_problem_is_told_at_once_by_line_key_and_nearest_name():
    text = TWO_SITES
    for old, new in (
        ('kind = "a100-80g"', 'kind = "a100-80"'),
        ("devices = 4", 'devices = "4"'),
        ("latency_ms = 10", "latncy_ms = 10"),
        ("bandwidth_gbit_s = 10", "bandwidth_gbit_s = -10"),
        ('"oslo",\n]', '"osl",\n]'),
        ('link = "infiniband-hdr"', 'link = "infiniband-hrd"'),
        ('like = "v100-16g"', 'like = "v100-16gb"'),
        ("f16 = 112", "f16 = 0"),
    ):
        assert old in text
        text = text.replace(old, new)
    assert wrong(text) == [
        "c.toml:5: sites.link: unknown link 'infiniband-hrd'; did you mean 'infiniband-hdr'?",
        "c.toml:7: sites.nodes.kind: unknown kind 'a100-80'; did you mean 'a100-80g'?",
        "c.toml:16: sites.nodes.devices: must be a whole number of at least 1, not '4'",
        "c.toml:18: links.wan: missing field: give one of latency_us, latency_ms, latency_s",
        "c.toml:19: links.wan.between: link 'wan': unknown site or node 'osl'; did you mean 'oslo'?",
        "c.toml:23: links.wan.bandwidth_gbit_s: must be a number of at least 0, but is -10",
        "c.toml:24: links.wan.latncy_ms: unknown field; did you mean 'latency_ms'?",
        "c.toml:28: kinds.mine.like: unknown preset 'v100-16gb'; did you mean 'v100-16g'?",
        "c.toml:30: kinds.mine.peak_tflops.f16: kind 'mine': peak FLOP/s in f16 must be positive, not 0.0",
    ]


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "says"),
    [
        ('name = "two"', 'nome = "two"', 1, "nome", "did you mean 'name'"),
        ('name = "two"', "", 0, "", "missing field 'name'"),
        ('name = "oslo"\n', "", 11, "sites", "missing field 'name'"),
        ("count = 2", "count = 0", 9, "sites.nodes.count", "at least 1"),
        ("count = 2", "count = true", 9, "sites.nodes.count", "not True"),
        ('link = "infiniband-hdr"', "", 3, "sites.link", "2 nodes and no link between them"),
        ("bandwidth_gbit_s = 10", "bandwidth_gbit_s = 0", 23, "links.wan.bandwidth_gbit_s", "positive"),
        ("latency_ms = 10", "latency_ms = 10\nlatency_us = 3", 25, "links.wan.latency_us", "keep one"),
        ("latency_ms = 10", "latency_ms = inf", 24, "links.wan.latency_ms", "but is inf"),
        ("latency_ms = 10", 'duplex = "ful"\nlatency_s=0', 24, "links.wan.duplex", "'full'"),
        ("[1048576, 1.2]", "[1024, 1.2]", 25, "links.wan.curve_gb_s", "ascend"),
        ("[1048576, 1.2]", "[1048576]", 25, "links.wan.curve_gb_s", "pairs"),
        ("f16 = 112", "f17 = 112", 30, "kinds.mine.peak_tflops.f17", "unknown dtype 'f17'"),
        ("memory_gb = 32", "memory_gb = -1", 29, "kinds.mine.memory_gb", "-1"),
        ("memory_gb = 32", 'platform = "cud"', 29, "kinds.mine.platform", "'cuda'"),
        ('name = "oslo"', 'name = "lyon"', 11, "sites", "two sites or nodes are called 'lyon'"),
        ('"oslo",\n]', '"big",\n]', 11, "sites.between", "no link between them"),
        ("[kinds.mine]", "[kinds]\nother = 3\n[kinds.mine]", 28, "kinds.other", "must be a table"),
    ],
)  # fmt: skip
def test_a_problem_is_told_where_it_is(old, new, line, key, says):
    assert old in TWO_SITES
    found = wrong(TWO_SITES.replace(old, new, 1))
    where = f"c.toml:{line}: " if line else "c.toml: "
    assert any(p.startswith(where + (f"{key}: " if key else "")) and says in p for p in found), found


def test_an_own_kind_without_base_says_what_it_lacks():
    found = wrong(TWO_SITES.replace('like = "v100-16g"\n', "").replace('"mine"\ndev', '"mine"\nlink="nvlink2"\ndev'))
    assert len(found) == 2
    assert "missing field 'platform'" in found[0]
    assert "memory_bandwidth_gb_s, memory_bandwidth_bytes_s" in found[1]


def test_a_node_whose_link_is_not_known_says_which_there_are():
    own = TWO_SITES.replace('like = "v100-16g"', 'platform = "cuda"\nmemory_bandwidth_gb_s = 900')
    (found,) = wrong(own)
    assert found.startswith("c.toml:13: sites.nodes: missing field 'link'")
    assert "nvlink2" in found


def test_what_is_not_toml_is_a_parse_error_with_line_and_caret():
    with pytest.raises(ParseError) as caught:
        Cluster.parse('name = "x"\nsites = [\n  = 3\n', "c.toml")
    assert caught.value.line == 3
    assert "c.toml:3:" in str(caught.value)
    with pytest.raises(ParseError, match="twice"):
        Cluster.parse("name = 'x'\nname = 'y'\n", "twice")


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ClusterError, match=re.escape(str(tmp_path / "no.toml"))):
        Cluster.from_toml(tmp_path / "no.toml")


def test_lines_of_keys_survive_long_strings_arrays_and_dotted_headers():
    text = (
        'a = """one [x]\nb = 2\n"""\n'  # 1-3
        "'odd key'.c = [\n 1, # ] not yet\n 2 ]\n"  # 4-6
        "[t.u]\nd = { e = 1, f = '#' } # g = 3\n"  # 7-8
        "[[t.list]]\nh = 1\n[[t.list]]\nh = '''x\n'''\n[t.list.sub]\ni = 4\n"  # 9-15
    )
    lines = key_lines(text)
    assert lines["a",] == 1
    assert ("b",) not in lines
    assert lines["odd key", "c"] == 4
    assert lines["t", "u", "d"] == 8
    assert line_of(lines, ("t", "u", "d", "e")) == 8
    assert lines["t", "list", 0, "h"] == 10
    assert lines["t", "list", 1] == 11
    assert lines["t", "list", 1, "sub", "i"] == 15
    assert line_of(lines, ("nowhere",)) == 0
