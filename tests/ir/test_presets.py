"""Presets: whole, sourced, and consistent with what vendors publish of the same part."""

import pytest

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, Node, Site


@pytest.mark.parametrize("kind", presets.KINDS.values(), ids=list(presets.KINDS))
def test_a_kind_is_usable_and_sourced(kind):
    link = presets.LINKS[presets.KIND_LINK[kind.name]]
    cluster = Cluster("c", (kind,), (Site("s"),), (Node("n", kind.name, 2, "s", link.name),), (link,))
    assert Cluster.parse(cluster.to_toml()) == cluster
    assert kind.source and link.source
    assert kind.supports("f32")
    assert kind.platform == "cpu" or (kind.jaxlib and kind.device_kinds)
    # A device does between 1 and 1000 operations in the time it reads a byte.
    assert 1 <= kind.peak("f32") / kind.memory_bandwidth_bytes_s <= 1000


def test_a_narrower_dtype_is_never_slower():
    for kind in presets.KINDS.values():
        order = [d for d in ("f64", "f32", "tf32", "bf16", "f8e5m2") if d in dict(kind.peak_flops)]
        peaks = [kind.peak(d) for d in order]
        assert peaks == sorted(peaks), kind.name


def test_known_figures():
    a100, h100 = presets.KINDS["a100-80g"], presets.KINDS["h100-80g"]
    assert (a100.peak("bf16"), a100.memory_bandwidth_bytes_s) == (312e12, 2.039e12)
    assert h100.peak("bf16") == pytest.approx(989.4e12)
    assert presets.LINKS["nvlink3"].bandwidth_bytes_s * 2 == 600e9
    # PCI Express: lanes x transfers x 128/130 over 8 bits.
    for name, rate in (("pcie3-x16", 8e9), ("pcie4-x16", 16e9), ("pcie5-x16", 32e9)):
        expected = 16 * rate * 128 / 130 / 8
        assert presets.LINKS[name].bandwidth_bytes_s == pytest.approx(expected, rel=1e-3)


def test_no_two_kinds_answer_to_the_same_name():
    said = [(k.platform, n) for k in presets.KINDS.values() for n in k.device_kinds]
    assert len(said) == len(set(said))
