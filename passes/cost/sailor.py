"""Reads the profiles, link measurements and executed plans published with the planner Sailor.

Their folder holds (all as JSON):

  profiles/MODEL/GPU/profile.json    [microbatch][tensor degree][layer] =
                                     [forward_s, backward_s, update_s]
  llm_info.json                      [model][tensor degree][layer] = floats held
  links/intra_node_bandwidths.json   [gpu][gpus] = [coefficients, peak bytes/s] inside a node
  links/multizone_bandwidths_het.json  [zone][gpu][gpus][zone][gpu][gpus] = the same between nodes
  training_config_*.json             shapes of the models

The coefficients are of a polynomial in log2(message size in 10^6 bytes) that gives 10^9 bytes/s,
summed over all pairs of GPUs that sent at once. Activation sizes are in floats of four bytes, per
example of a microbatch.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, Link, Node, Site
from hetjax.ir.errors import PlanError
from hetjax.ir.json_text import parse_json
from hetjax.ir.suggest import nearest
from hetjax.passes.cost.profiles import LayerKey, LayerTime, Profiles

# Their name of a GPU -> our device kind. Their RTX-2080 has 11 GB.
KINDS = {
    "A100-40": "a100-40g",
    "A100-80": "a100-80g",
    "GH-96": "gh200",
    "V100-16": "v100-16g",
    "Titan-RTX": "titan-rtx",
    "RTX-2080": "rtx-2080ti",
    "RTX-3090": "rtx-3090",
}
_FLOAT = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """One data-parallel copy of a stage, on one node.

    Attributes:
      gpu: their name of the GPU.
      gpus: how many the node has.
      zone: where it is.
      tensor: tensor-parallel degree.
    """

    gpu: str
    gpus: int
    zone: str
    tensor: int

    @property
    def kind(self) -> str:
        """Returns the device kind's name."""
        return KINDS[self.gpu]


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedPlan:
    """An executed plan.

    Attributes:
      layers: layer numbers, per stage.
      replicas: per stage.
      microbatch: examples of one microbatch of one replica.
      batch: examples of a step.
      measured_s, measured_bytes: what running it took, or None.
    """

    layers: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[Replica, ...], ...]
    microbatch: int
    batch: int
    measured_s: float | None = None
    measured_bytes: int | None = None

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def num_microbatches(self) -> int:
        """Returns what each replica runs in a step; a batch that does not divide is rounded up."""
        return math.ceil(self.batch / (self.microbatch * len(self.replicas[0])))


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSize:
    """Bytes of one layer on one device, activations per example.

    Attributes:
      parameters: number of parameters.
      stored_bytes: what the forward keeps for the backward.
      output_bytes: what it hands on.
    """

    parameters: int
    stored_bytes: int
    output_bytes: int


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
      name: "OPT-350".
      profiles: its layers' times.
      sizes: (tensor degree, layer) to size.
      heads, sequence: attention heads and tokens per example; 0 where not published.
    """

    name: str
    profiles: Profiles
    sizes: dict[tuple[int, int], LayerSize]
    heads: int = 0
    sequence: int = 0

    def size(self, tensor: int, layer: int) -> LayerSize:
        """Returns a layer's size.

        Raises:
          PlanError: the model has no such layer or degree; says what there is.
        """
        if (tensor, layer) in self.sizes:
            return self.sizes[tensor, layer]
        degrees = sorted({t for t, _ in self.sizes})
        if tensor not in degrees:
            raise PlanError(
                f"model {self.name}: no sizes for {tensor}-way tensor parallel; there are {degrees}"
            )
        last = max(n for t, n in self.sizes if t == tensor)
        raise PlanError(f"model {self.name} has no layer {layer}; its layers are 0 … {last}")


def read_model(folder: str | Path, name: str) -> Model:
    """Returns a model's profiles and sizes.

    Raises:
      PlanError: the folder has no such model; names the nearest.
    """
    folder = Path(folder)
    infos = load_json(folder / "llm_info.json")
    if name not in infos:
        raise PlanError(f"{folder}: no model {name!r}{nearest(name, infos)}")
    sizes = {
        (int(tensor), int(layer)): LayerSize(
            info["params_floats"],
            info["act_mem_floats"] * _FLOAT,
            info["act_output_floats"] * _FLOAT,
        )
        for tensor, layers in infos[name].items()
        for layer, info in layers.items()
    }
    entries = []
    for gpu, kind in KINDS.items():
        path = folder / "profiles" / name / gpu / "profile.json"
        if not path.exists():
            continue
        for microbatch, degrees in load_json(path).items():
            for tensor, layers in degrees.items():
                for layer, (forward_s, backward_s, update_s) in layers.items():
                    key = LayerKey(name, kind, int(tensor), int(microbatch), layer)
                    entries.append((key, LayerTime(forward_s, backward_s, update_s, "imported")))
    shape = {}
    for path in sorted(folder.glob("training_config_*.json")):
        config = load_json(path)
        if config.get("model") == name:
            shape = config
    return Model(
        name, Profiles(entries), sizes, shape.get("heads", 0), shape.get("sequence_length", 0)
    )


def model_names(folder: str | Path) -> list[str]:
    """Returns the models that a folder has sizes and profiles of."""
    folder = Path(folder)
    return [name for name in load_json(folder / "llm_info.json") if (folder / "profiles" / name).is_dir()]


def find_folder(path: str | Path) -> Path | None:
    """Returns the folder of published data that a plan file lies in, or None."""
    parents = Path(path).resolve().parents
    return next((p for p in parents if (p / "llm_info.json").exists()), None)


def model_of(folder: str | Path, plan: PublishedPlan) -> str:
    """Returns the one published model that has as many layers as a plan.

    Raises:
      PlanError: none has, or several have; says which there are.
    """
    count = 1 + max(layer for stage in plan.layers for layer in stage)
    infos = load_json(Path(folder) / "llm_info.json")
    layers = {name: len(next(iter(degrees.values()))) for name, degrees in infos.items()}
    fitting = [name for name, n in layers.items() if n == count]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(f"{name} ({n} layers)" for name, n in layers.items())
    raise PlanError(f"the plan has {count} layers; name its model with --model: {there}")


def read_plan(text: str, filename: str = "<json>") -> PublishedPlan:
    """Returns the plan of a plan file.

    Raises:
      ParseError: the text is not JSON.
      PlanError: it is no plan of theirs, or uses what cannot be priced here; every problem by key.
    """
    data = parse_json(text, filename)
    fields = ("pipeline_list", "mbs", "gbs")
    missing = [f for f in fields if not isinstance(data, dict) or f not in data]
    if missing:
        raise PlanError([f"{filename}: missing field {f!r}" for f in missing])
    pipelines = data["pipeline_list"]
    if isinstance(pipelines, str):  # their files hold a Python literal in a string
        try:
            pipelines = ast.literal_eval(pipelines)
        except (ValueError, SyntaxError):
            raise PlanError(f"{filename}: pipeline_list: not a list of pipelines") from None
    if not isinstance(pipelines, list) or len(pipelines) != 1:
        raise PlanError(f"{filename}: pipeline_list: exactly one pipeline can be priced")
    problems = [
        f"{filename}: {key}: must be a whole number of at least 1, not {data[key]!r}"
        for key in ("mbs", "gbs")
        if type(data[key]) is not int or data[key] < 1
    ]
    try:
        layers = tuple(tuple(stage) for stage in pipelines[0]["layers_per_stage"])
        replicas = tuple(
            tuple(Replica(nodes[0][0], nodes[0][1], nodes[0][2], tensor) for nodes, tensor in stage)
            for stage in pipelines[0]["tmp_per_stage"]
        )
        spread = any(
            len(nodes) != 1 for stage in pipelines[0]["tmp_per_stage"] for nodes, _ in stage
        )
        problems += [
            f"{filename}: tmp_per_stage[{s}]: a replica of {tensor} GPUs on a node of {nodes[0][1]}"
            for s, stage in enumerate(pipelines[0]["tmp_per_stage"])
            for nodes, tensor in stage
            if len(nodes) == 1 and nodes[0][1] < tensor
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PlanError(
            f"{filename}: pipeline_list: not as in their plan files ({error!r})"
        ) from None
    if len(layers) != len(replicas) or not layers:
        problems.append(
            f"{filename}: {len(layers)} stages have layers, {len(replicas)} have devices"
        )
    if spread:
        problems.append(f"{filename}: tmp_per_stage: a replica that spans nodes cannot be priced")
    for s, stage in enumerate(replicas):
        if len(stage) != len(replicas[0]):
            problems.append(
                f"{filename}: stage {s} has {len(stage)} replicas, stage 0 {len(replicas[0])}"
            )
        problems += [
            f"{filename}: tmp_per_stage[{s}]: unknown GPU {gpu!r}{nearest(gpu, KINDS)}"
            for gpu in sorted({r.gpu for r in stage if r.gpu not in KINDS})
        ]
    problems += [f"{filename}: {p}" for p in _contradictions(data, pipelines[0], layers, replicas)]
    if problems:
        raise PlanError(list(dict.fromkeys(problems)))
    real, peak = data.get("real"), data.get("max_mem")
    return PublishedPlan(layers, replicas, data["mbs"], data["gbs"], real, peak)


def _contradictions(
    data: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    layers: Sequence[Sequence[int]],
    replicas: Sequence[Sequence[Replica]],
) -> Iterator[str]:
    """Yields what a plan says that cannot be, or that it says otherwise elsewhere."""
    stages, shares = pipeline.get("num_stages"), pipeline.get("dp")
    if type(stages) is int and stages != len(layers):
        yield f"num_stages: {stages}, and layers_per_stage has {len(layers)}"
    if isinstance(shares, list) and shares != [len(stage) for stage in replicas]:
        yield f"dp: {shares}, and tmp_per_stage has {[len(stage) for stage in replicas]} replicas"
    flat = [layer for stage in layers for layer in stage]
    if any(type(n) is not int for n in flat) or any(b <= a for a, b in itertools.pairwise(flat)):
        yield "layers_per_stage: layers must be whole numbers, each more than the one before"
    for key in ("real", "max_mem"):
        value = data.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            yield f"{key}: must be a number, not {value!r}"


def plan_cluster(folder: str | Path, plan: PublishedPlan) -> Cluster:
    """Returns the cluster a plan ran on, with the links they measured there.

    Nodes of one kind, size and zone are a site; node "s1r0" holds replica 0 of stage 1.

    Raises:
      PlanError: a link the plan uses was not measured.
    """
    inside = load_json(Path(folder) / "links" / "intra_node_bandwidths.json")
    between = load_json(Path(folder) / "links" / "multizone_bandwidths_het.json")

    def site_of(r: Replica) -> str:
        return f"{r.zone}/{r.gpu}x{r.tensor}"

    placed = [
        (f"s{s}r{i}", r) for s, stage in enumerate(plan.replicas) for i, r in enumerate(stage)
    ]
    kinds = {site_of(r): r for _, r in placed}
    links: dict[str, Link] = {}
    for site, r in kinds.items():
        if r.tensor > 1 and str(r.tensor) not in inside.get(r.gpu, {}):
            raise PlanError(f"no measured link inside a node of {r.tensor} {r.gpu}")
        links[f"{site} inside"] = _inside(inside, r.gpu, r.tensor, f"{site} inside")
        for other, o in kinds.items():
            if other < site:
                continue
            entry = _dig(between, r.zone, r.gpu, str(r.tensor), o.zone, o.gpu, str(o.tensor))
            if entry is None:
                wrong = [z for z in (r.zone, o.zone) if z not in between]
                hint = f": unknown zone {wrong[0]!r}{nearest(wrong[0], between)}" if wrong else ""
                raise PlanError(
                    f"no measured link from {r.tensor} {r.gpu} in {r.zone} "
                    f"to {o.tensor} {o.gpu} in {o.zone}{hint}"
                )
            name = f"{site} nodes" if other == site else f"{site} - {other}"
            ends = () if other == site else (site, other)
            links[name] = dataclasses.replace(measured_link(name, entry, r.tensor), between=ends)
    sites = [Site(site, f"{site} nodes") for site in kinds]
    nodes = [
        Node(name, r.kind, r.tensor, site_of(r), f"{site_of(r)} inside")
        for site in kinds
        for name, r in placed
        if site_of(r) == site
    ]
    return Cluster(
        "published",
        tuple(presets.KINDS[k] for k in sorted({r.kind for _, r in placed})),
        tuple(sites),
        tuple(nodes),
        tuple(links.values()),
    )


def inside_link(folder: str | Path, gpu: str, gpus: int) -> Link:
    """Returns the link between GPUs of one node: as measured, or the usual one of their kind."""
    inside = load_json(Path(folder) / "links" / "intra_node_bandwidths.json")
    return _inside(inside, gpu, gpus, f"{gpus} x {gpu} inside")


def _inside(inside: Any, gpu: str, gpus: int, name: str) -> Link:
    entry = _dig(inside, gpu, str(gpus))
    if entry is not None:
        return measured_link(name, entry, max(1, gpus // 2))
    return dataclasses.replace(presets.LINKS[presets.KIND_LINK[KINDS[gpu]]], name=name)


def measured_link(name: str, entry: Sequence[Any], pairs: int) -> Link:
    """Returns a link from their polynomial: what a node sends, by bytes of all pairs together.

    The latency is what a message of 10^6 bytes takes beyond the peak rate; the bandwidth never
    falls as messages grow, as a polynomial outside its data would have it.
    """
    (c2, c1, c0), peak = entry
    times = []
    best = 0.0
    for x in range(11):  # messages from 2^0 to 2^10 million bytes
        best = max(best, min(peak, 1e9 * (c2 * x * x + c1 * x + c0)))
        nbytes = pairs * 2**x * 1_000_000
        times.append((nbytes, nbytes / best))
    latency_s = max(0.0, times[0][1] - times[0][0] / peak)
    curve = tuple((n, n / (t - latency_s)) for n, t in times)
    return Link(
        name, peak, latency_s, curve=curve, source="published with Sailor, measured with NCCL"
    )


def _dig(data: Any, *path: str) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def load_json(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {error}") from None
    return parse_json(text, str(path))
