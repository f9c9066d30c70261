"""What hetjax knows about a make of accelerator, and which devices at hand stand for a cluster's.

A registry of `Accelerator`s by platform: cpu, cuda, rocm, tpu, and `sim`, which stands for any kind
on CPU devices: right numbers, modelled time.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, DeviceKind, Link, Node, Site
from hetjax.ir.errors import ClusterError
from hetjax.ir.suggest import nearest


@runtime_checkable
class Accelerator(Protocol):
    """One make of accelerator.

    Attributes:
      name: its name in the registry.
      platform: what JAX calls its back end.
      collectives: the collectives XLA has for it, by their JAX names.
      transfer_paths: ways an array can leave it for a device of another mesh, best first:
        "device_put" in one process, "transfer" for `jax.experimental.transfer`, "host" through
        host memory and a stream.
    """

    @property
    def name(self) -> str: ...
    @property
    def platform(self) -> str: ...
    @property
    def collectives(self) -> tuple[str, ...]: ...
    @property
    def transfer_paths(self) -> tuple[str, ...]: ...

    def kinds(self) -> tuple[DeviceKind, ...]:
        """Returns the device kinds of this make that are known by name."""
        ...

    def links(self) -> Mapping[str, Link]:
        """Returns, by kind name, the link that usually joins its devices in a node."""
        ...

    def kernels(self, kind: DeviceKind) -> tuple[str, ...]:
        """Returns the names of the special kernels whose predicates hold on a kind."""
        ...

    def modelled_seconds(self, kind: DeviceKind, flops: float, nbytes: float, dtype: str) -> float:
        """Returns the seconds that work should take on a kind, at least."""
        ...

    def recognise(self, device: Any) -> DeviceKind | None:
        """Returns the kind of a `jax.Device`, or None when it is of another make."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A special kernel and the kinds it runs on.

    Attributes:
      name: "flash-attention".
      dtypes: what a kind must compute in natively, all of them.
      kinds: the kinds it was written for, by name; () for every kind of the make.
    """

    name: str
    dtypes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def runs_on(self, kind: DeviceKind) -> bool:
        """Returns whether the kernel runs on a kind."""
        return all(kind.supports(d) for d in self.dtypes) and (
            not self.kinds or kind.name in self.kinds
        )


@dataclasses.dataclass(frozen=True)
class Make:
    """An `Accelerator` described by data; see there.

    Attributes:
      special: its special kernels.
    """

    name: str
    platform: str
    collectives: tuple[str, ...]
    transfer_paths: tuple[str, ...]
    special: tuple[Kernel, ...] = ()

    def kinds(self) -> tuple[DeviceKind, ...]:
        return tuple(k for k in presets.KINDS.values() if k.platform == self.platform)

    def links(self) -> Mapping[str, Link]:
        return {k.name: presets.LINKS[presets.KIND_LINK[k.name]] for k in self.kinds()}

    def kernels(self, kind: DeviceKind) -> tuple[str, ...]:
        return tuple(k.name for k in self.special if k.runs_on(kind))

    def modelled_seconds(self, kind: DeviceKind, flops: float, nbytes: float, dtype: str) -> float:
        # Roofline (Williams, Waterman and Patterson 2009): the slower of arithmetic and memory.
        return max(flops / kind.peak(dtype), nbytes / kind.memory_bandwidth_bytes_s)

    def recognise(self, device: Any) -> DeviceKind | None:
        if jax_platform(device) != self.platform:
            return None
        said = device.device_kind.lower()
        matches = [
            (len(part), kind.name, kind)
            for kind in self.kinds()
            for part in kind.device_kinds
            if part.lower() in said
        ]
        if matches:
            return max(matches)[2]
        return presets.KINDS["cpu"] if self.platform == "cpu" else None


@dataclasses.dataclass(frozen=True)
class Simulated(Make):
    """Any kind, stood for by CPU devices."""

    def kinds(self) -> tuple[DeviceKind, ...]:
        return tuple(presets.KINDS.values())

    def recognise(self, device: Any) -> DeviceKind | None:
        # A CPU device is a CPU device; that it stands for something else is the user's say.
        return None


_ALL = ("psum", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute")
_registry: dict[str, Accelerator] = {}


def register(accelerator: Accelerator) -> None:
    """Adds a make of accelerator, or replaces the one of that name."""
    _registry[accelerator.name] = accelerator


def names() -> tuple[str, ...]:
    """Returns the registered names, sorted."""
    return tuple(sorted(_registry))


def get(name: str) -> Accelerator:
    """Returns the accelerator of a name.

    Raises:
      ClusterError: there is none.
    """
    if name not in _registry:
        raise ClusterError(f"unknown accelerator {name!r}{nearest(name, _registry)}")
    return _registry[name]


def by_platform(platform: str) -> Accelerator:
    """Returns the accelerator that runs on a JAX back end.

    Raises:
      ClusterError: there is none.
    """
    for accelerator in _registry.values():
        if accelerator.platform == platform and accelerator.name != "sim":
            return accelerator
    known = [a.platform for a in _registry.values()]
    raise ClusterError(f"no accelerator for platform {platform!r}{nearest(platform, known)}")


for _make in (
    Make("cpu", "cpu", _ALL, ("device_put", "transfer", "host")),
    Make(
        "nvidia",
        "cuda",
        _ALL,
        ("device_put", "transfer", "host"),
        # Both want compute capability 8.0, which is where bf16 begins.
        (Kernel("cudnn-flash-attention", ("bf16", "f16")), Kernel("triton-gemm", ("bf16",))),
    ),
    Make("amd", "rocm", _ALL, ("device_put", "host")),
    Make(
        "tpu",
        "tpu",
        _ALL,
        ("device_put", "transfer", "host"),
        (Kernel("pallas-flash-attention", ("bf16",)),),
    ),
    Simulated("sim", "cpu", _ALL, ("device_put", "transfer", "host")),
):
    register(_make)


# Devices at hand.


def jax_platform(device: Any) -> str:
    """Returns "cpu", "cuda", "rocm" or "tpu" for a `jax.Device`; JAX itself says "gpu" for two."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def describe_devices(devices: Sequence[Any] | None = None) -> Cluster:
    """Returns a cluster that describes JAX devices, in their order by process.

    Devices of one process are a node; of one slice, where the platform has slices, a site.

    Args:
      devices: `jax.Device`s; None for all that JAX sees.

    Raises:
      ClusterError: there is none, or a process holds devices of two kinds.
    """
    if devices is None:
        import jax

        devices = tuple(jax.devices())
    if not devices:
        raise ClusterError("there is no device to describe; give at least one")
    by_node: dict[tuple[int, int], list[Any]] = {}
    for device in devices:
        by_node.setdefault(
            (getattr(device, "slice_index", None) or 0, device.process_index), []
        ).append(device)
    kinds: dict[str, DeviceKind] = {}
    nodes, sites, links = [], {}, {}
    several_slices = len({s for s, _ in by_node}) > 1
    for (slice_index, process), members in sorted(by_node.items(), key=lambda item: item[0]):
        found = {kind.name: kind for kind in (_kind_of(d, len(members)) for d in members)}
        if len(found) > 1:
            raise ClusterError(
                f"process {process} holds devices of several kinds ({', '.join(found)}); "
                "describe them in a TOML file"
            )
        kind = next(iter(found.values()))
        kinds[kind.name] = kind
        site = f"slice{slice_index}" if several_slices else "local"
        sites.setdefault(site, []).append(process)
        inner = presets.LINKS[presets.KIND_LINK.get(kind.name, "pcie3-x16")]
        links[inner.name] = inner
        nodes.append(Node(f"{site}-{process}", kind.name, len(members), site, inner.name))
    network = presets.LINKS["10gbe"]
    if len(nodes) > 1:
        links[network.name] = network
    if several_slices:
        between = dataclasses.replace(
            network, name="slices", between=tuple(sites), source="assumed"
        )
        links[between.name] = between
    return Cluster(
        "local",
        tuple(kinds.values()),
        tuple(Site(name, network.name if len(held) > 1 else "") for name, held in sites.items()),
        tuple(nodes),
        tuple(links.values()),
    )


def _kind_of(device: Any, sharers: int) -> DeviceKind:
    platform = jax_platform(device)
    kind = next((k for k in (a.recognise(device) for a in _registry.values()) if k), None)
    if platform == "cpu" and kind:
        # Whole GiB: what the kernel keeps for itself differs from boot to boot, and plans carry the
        # cluster's hash.
        gib = max(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30)
        return dataclasses.replace(kind, memory_bytes=(gib << 30) // sharers)
    if kind:
        return kind
    stats = (device.memory_stats() or {}) if hasattr(device, "memory_stats") else {}
    return DeviceKind(
        device.device_kind.lower().replace(" ", "-"),
        platform,
        int(stats.get("bytes_limit", 8e9)),
        1e11,
        (("f32", 1e12),),
        device_kinds=(device.device_kind,),
        source="not a known kind: memory from the device, speeds an order of magnitude",
    )


def match_devices(
    cluster: Cluster, jax_devices: Sequence[Any] | None = None, *, rehearse: bool = False
) -> tuple[Any, ...]:
    """Returns one `jax.Device` for each device of a cluster, in its order.

    Args:
      cluster: what is described.
      jax_devices: what is at hand; None for all that JAX sees.
      rehearse: lets CPU devices stand for any kind.

    Raises:
      ClusterError: what is described is not at hand; lists both sides and the ways on.
    """
    if jax_devices is None:
        import jax

        jax_devices = tuple(jax.devices("cpu") if rehearse else jax.devices())
    if rehearse:
        cpus = [d for d in jax_devices if d.platform == "cpu"]
        if len(cpus) >= cluster.num_devices:
            return tuple(cpus[: cluster.num_devices])
        raise ClusterError(
            f"a rehearsal of cluster {cluster.name!r} needs {cluster.num_devices} CPU devices, and "
            f"JAX sees {len(cpus)}; before JAX starts, set {_forcing(cluster.num_devices)}"
        )
    # A device serves the kinds whose pattern is the longest that fits its name; two CPU kinds tie.
    free = [(d, _fitting_kinds(d, cluster.kinds)) for d in jax_devices]
    chosen = []
    for device in cluster.devices:
        fit = next((i for i, (_, names) in enumerate(free) if device.kind in names), None)
        if fit is None:
            raise ClusterError(_mismatch(cluster, jax_devices))
        chosen.append(free.pop(fit)[0])
    return tuple(chosen)


def _fitting_kinds(device: Any, kinds: Sequence[DeviceKind]) -> frozenset[str]:
    platform, said = jax_platform(device), device.device_kind.lower()
    lengths = {}
    for kind in kinds:
        parts = kind.device_kinds or (("",) if platform == "cpu" else (kind.name,))
        fitting = [len(p) for p in parts if p.lower() in said and kind.platform == platform]
        if fitting:
            lengths[kind.name] = max(fitting)
    return frozenset(k for k, n in lengths.items() if n == max(lengths.values()))


def _mismatch(cluster: Cluster, jax_devices: Sequence[Any]) -> str:
    need = collections.Counter(d.kind for d in cluster.devices)
    seen = collections.Counter((d.device_kind, jax_platform(d)) for d in jax_devices)
    described = [f"{n} x {name} ({cluster.kind(name).platform})" for name, n in need.items()]
    at_hand = [f"{n} x {kind} ({platform})" for (kind, platform), n in seen.items()]
    return "\n".join(
        [
            f"cluster {cluster.name!r} is not the devices at hand",
            f"  described: {', '.join(described)}",
            f"  JAX sees:  {', '.join(at_hand) or 'none'}",
            "  ways on:",
            "    plan only: plan_for or lower with jax.ShapeDtypeStruct arguments needs no device",
            f"    rehearse=True: {cluster.num_devices} CPU devices stand in; before JAX starts, set",
            f"      {_forcing(cluster.num_devices)}",
            "    describe what is at hand instead: hetjax cluster from-jax prints it",
        ]
    )


def _forcing(count: int) -> str:
    # NPROC gives XLA's pool the threads that collectives of many devices on few cores wait for.
    return f"XLA_FLAGS=--xla_force_host_platform_device_count={count} NPROC={4 * count}"
