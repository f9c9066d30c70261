"""The register of accelerators, and matching a described cluster to devices at hand."""

import dataclasses
import types

import jax
import pytest

from hetjax.ir import accelerator, presets
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import ClusterError

UNLIKE_CPUS = """
name = "unlike"
[kinds.fast]
like = "cpu"
[kinds.slow]
like = "cpu"
peak_tflops = { f32 = 0.01 }
[[sites]]
name = "a"
nodes = [{ kind = "fast", devices = 2 }]
[[sites]]
name = "b"
nodes = [{ kind = "slow", devices = 6 }]
[links.wan]
like = "10gbe"
between = ["a", "b"]
"""


@dataclasses.dataclass(frozen=True)
class SeenDevice:
    """What matching reads of a `jax.Device` of a GPU that the test machine lacks."""

    id: int
    device_kind: str
    version: str = "PJRT C API\ncuda 12080"
    platform: str = "gpu"
    process_index: int = 0

    @property
    def client(self):
        return types.SimpleNamespace(platform_version=self.version)

    def memory_stats(self):
        return {"bytes_limit": 7 * 10**9}


def gpus(*kinds, **fields):
    return [SeenDevice(i, kind, **fields) for i, kind in enumerate(kinds)]


def described(*nodes: tuple[str, int]) -> Cluster:
    lines = [f'[[sites.nodes]]\nkind = "{kind}"\ndevices = {n}' for kind, n in nodes]
    return Cluster.parse("\n".join(['name = "c"', "[[sites]]", 'name = "s"', 'link = "10gbe"', *lines]))


@pytest.mark.quick
def test_built_in_makes_are_registered_by_name_and_platform():
    assert set(accelerator.names()) >= {"cpu", "nvidia", "amd", "tpu", "sim"}
    assert accelerator.by_platform("cuda").name == "nvidia"
    assert accelerator.by_platform("cpu").name == "cpu"
    for name in accelerator.names():
        make = accelerator.get(name)
        assert isinstance(make, accelerator.Accelerator)
        assert {k.name for k in make.kinds()} == set(make.links())
        assert "device_put" in make.transfer_paths
    with pytest.raises(ClusterError, match="did you mean 'nvidia'"):
        accelerator.get("nvida")
    with pytest.raises(ClusterError, match="did you mean 'rocm'"):
        accelerator.by_platform("rocn")


def test_sim_stands_for_every_kind():
    assert {k.name for k in accelerator.get("sim").kinds()} == set(presets.KINDS)


def test_a_make_of_ones_own_can_be_registered(monkeypatch):
    monkeypatch.setattr(accelerator, "_registry", dict(accelerator._registry))
    own = accelerator.Make("abacus", "cpu", (), ("host",))
    accelerator.register(own)
    assert accelerator.get("abacus") is own


def test_kernels_run_where_their_predicate_holds():
    nvidia = accelerator.get("nvidia")
    assert "cudnn-flash-attention" in nvidia.kernels(presets.KINDS["a100-80g"])
    assert nvidia.kernels(presets.KINDS["v100-16g"]) == ()


def test_modelled_seconds_is_the_slower_of_arithmetic_and_memory():
    sim, kind = accelerator.get("sim"), presets.KINDS["a100-80g"]
    assert sim.modelled_seconds(kind, 312e12, 1, "bf16") == pytest.approx(1.0)
    assert sim.modelled_seconds(kind, 1, 2039e9 * 3, "bf16") == pytest.approx(3.0)


def test_dtypes_a_kind_has_emulates_and_lacks():
    v100, tpu = presets.KINDS["v100-16g"], presets.KINDS["tpu-v5e"]
    assert v100.supports("f16") and not v100.supports("bf16") and v100.emulates("bf16")
    assert v100.peak("bf16") == v100.peak("f32")
    assert v100.supports("i32") and v100.supports("bool") and v100.supports("u8")
    assert tpu.dtypes == ("bf16", "f32", "i8") and tpu.emulates("f64")
    assert v100.peak("c64") == v100.peak("f32")
    with pytest.raises(ClusterError, match=r"'v100-16g' has no f8e5m2: it computes in f64, f32, f16 and emulates bf16"):
        v100.peak("f8e5m2")
    assert "cuda12" in v100.jaxlib and "cuda13" not in v100.jaxlib


# Matching.


@pytest.mark.quick
def test_local_describes_what_jax_sees_and_matches_it():
    cluster = Cluster.local()
    assert cluster.num_devices == jax.device_count() == 8
    assert [d.kind for d in cluster.devices] == ["cpu"] * 8
    assert accelerator.match_devices(cluster) == tuple(jax.devices())
    assert Cluster.parse(cluster.to_toml()) == cluster
    assert Cluster.local() == cluster
    assert Cluster.local(jax.devices()[:3]).num_devices == 3
    with pytest.raises(ClusterError, match="no device"):
        Cluster.local([])


def test_two_kinds_of_cpu_take_the_devices_in_order():
    cluster = Cluster.parse(UNLIKE_CPUS)
    assert accelerator.match_devices(cluster) == tuple(jax.devices())


def test_unlike_gpus_are_matched_by_what_they_are_called():
    seen = gpus("NVIDIA GeForce RTX 2080 Ti", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 2080")
    cluster = described(("v100-16g", 1), ("rtx-2080", 1), ("rtx-2080ti", 1))
    assert [d.id for d in accelerator.match_devices(cluster, seen)] == [1, 2, 0]


def test_an_amd_gpu_is_not_an_nvidia_one():
    seen = gpus("AMD Instinct MI300X", version="PJRT C API\nrocm 60300")
    assert accelerator.match_devices(described(("mi300x", 1)), seen) == tuple(seen)
    cluster = Cluster.local(seen)
    assert cluster.kinds == (presets.KINDS["mi300x"],)


def test_local_gpus_are_recognised_and_strangers_are_described_as_such():
    cluster = Cluster.local(gpus("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"))
    assert cluster.kinds == (presets.KINDS["a100-80g"],)
    assert cluster.link(0, 1).name == "nvlink3"
    (stranger,) = Cluster.local(gpus("NVIDIA Q9000")).kinds
    assert (stranger.name, stranger.memory_bytes) == ("nvidia-q9000", 7 * 10**9)
    assert "not a known kind" in stranger.source
    with pytest.raises(ClusterError, match="several kinds"):
        Cluster.local(gpus("Tesla T4", "NVIDIA L4"))


def test_processes_are_nodes():
    cluster = Cluster.local([*gpus("Tesla T4"), *gpus("Tesla T4", process_index=1)])
    assert [n.name for n in cluster.nodes] == ["local-0", "local-1"]
    assert cluster.link(0, 1).name == "10gbe"


@pytest.mark.parametrize("text", [UNLIKE_CPUS.replace("devices = 6", "devices = 7"), None])
def test_what_is_not_at_hand_is_told_with_both_sides_and_the_ways_on(text):
    cluster = Cluster.parse(text) if text else described(("a100-80g", 8))
    with pytest.raises(ClusterError) as caught:
        accelerator.match_devices(cluster)
    message = str(caught.value)
    assert ("2 x fast (cpu), 7 x slow (cpu)" if text else "8 x a100-80g (cuda)") in message
    assert "8 x cpu (cpu)" in message
    for way in ("ShapeDtypeStruct", "rehearse=True", "hetjax cluster from-jax", f"count={cluster.num_devices}"):
        assert way in message


def test_a_rehearsal_takes_cpus_for_any_kind_and_says_how_to_have_more():
    cluster = described(("a100-80g", 4), ("tpu-v5e", 4))
    assert accelerator.match_devices(cluster, rehearse=True) == tuple(jax.devices("cpu"))
    with pytest.raises(ClusterError) as caught:
        accelerator.match_devices(described(("t4", 9)), rehearse=True)
    assert "needs 9 CPU devices, and JAX sees 8" in str(caught.value)
    assert "--xla_force_host_platform_device_count=9" in str(caught.value)
    assert "NPROC" in str(caught.value)
