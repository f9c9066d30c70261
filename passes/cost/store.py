"""The profile store: what was measured, on what, with what; one JSON file that only ever grows.

  {"hetjax_profiles": 1,
   "kinds": {"cpu": {...}},                      device kinds as they were described when measured
   "efficiency": {"cpu": {"top": 0.4, ...}},     curves fitted to the products and copies measured
   "calls": [{"kind": "cpu", "devices": 2, "base_s": 3e-05, "array_s": 1e-06}],
   "hosts": {"cpu": {"processors": 2, ...}},     what one process that drives devices of a kind spends itself
   "links": {"cpu": {...}},                      between two devices of a node
   "measured": [{"signature": "51593f…", "kind": "cpu", "data": 2, "model": 1, "nodes": 1, "link": {...},
                 "phase": "forward", "layer": "GPT/block_0", "step": "train_step", "microbatch": 4,
                 "seconds": 0.0012, "host_s": 0.0021, "spread": 0.05, "runs": 9, "arrays": 31,
                 "work": {"phase": "forward", "kernels": [[flops, bytes, "f32", false, count], ...],
                          "collective_s": 0.0, "collective_bytes": 0.0},
                 "versions": "jax 0.10.2, jaxlib 0.10.2", "cluster": "local", "source": "measured"}],
   "layers": [...]}                              see `hetjax.passes.cost.profiles`

`work` is what one device does, so that the residual forest can be trained from the file alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetjax.ir.cluster import DeviceKind, Link
from hetjax.ir.errors import PlanError
from hetjax.ir.json_text import parse_json
from hetjax.ir.plan import SOURCES
from hetjax.ir.suggest import nearest
from hetjax.passes.cost.forest import Sample
from hetjax.passes.cost.group import Group
from hetjax.passes.cost.host import HostTime
from hetjax.passes.cost.profiles import Profiles
from hetjax.passes.cost.roofline import Efficiency
from hetjax.passes.cost.work import WORK_PHASES, Work

VERSION = 1
# Two sites' measurements of the same work that differ by more are worth a word.
DIFFER = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One measurement of a layer, or of one product or copy.

    Attributes:
      signature: of the work, from `hetjax.passes.cost.layers.signature`; "" for imported layers.
      kind: the device kind's name.
      phase: one of `hetjax.passes.cost.work.WORK_PHASES`.
      seconds: of one call, in a row of calls.
      work: what one device does in it.
      data, model: sizes of the mesh's axes.
      nodes: how many nodes the devices lay on.
      link: the slowest link among them; None for one device.
      layer, step, microbatch: what it was, for people.
      host_s: seconds that all processors of the host together spent on one call.
      spread: (largest - least) / median of the runs.
      runs: how often it was measured.
      arrays: arguments and results of the call.
      versions: of what compiled it.
      cluster: where.
      source: one of `hetjax.ir.plan.SOURCES`.
    """

    signature: str
    kind: str
    phase: str
    seconds: float
    work: Work
    data: int = 1
    model: int = 1
    nodes: int = 1
    link: Link | None = None
    layer: str = ""
    step: str = ""
    microbatch: int = 0
    host_s: float = 0.0
    spread: float = 0.0
    runs: int = 1
    arrays: int = 0
    versions: str = ""
    cluster: str = ""
    source: str = "measured"

    @property
    def key(self) -> MeasuredKey:
        """Returns what the measurement is of; a second one of the same replaces it."""
        place = (self.kind, self.data, self.model, self.nodes)
        name = self.signature or repr((self.work, self.link, self.cluster, self.step, self.layer))
        return name, *place, self.versions

    @property
    def group(self) -> Group:
        return Group(self.data, self.model, self.nodes, self.link)


# Signature (or description), kind, data, model, nodes, versions.
MeasuredKey = tuple[str, str, int, int, int, str]


@dataclasses.dataclass(frozen=True, slots=True)
class CallTime:
    """What a compiled call takes that computes next to nothing.

    Attributes:
      base_s: of a call.
      array_s: of every argument and result.
    """

    base_s: float
    array_s: float

    def seconds(self, arrays: int) -> float:
        """Returns the seconds of a call with so many arguments and results."""
        return self.base_s + self.array_s * arrays


@dataclasses.dataclass(frozen=True)
class ProfileStore:
    """Everything that was measured or imported.

    Attributes:
      measured: by `Measured.key`.
      kinds: device kinds by name.
      efficiency: fitted curves by kind.
      calls: by (kind, devices).
      hosts: what a host's own work costs, by the kind of its devices.
      links: between two devices of a node, by kind.
      layers: imported tables of layers by name.
    """

    measured: Mapping[MeasuredKey, Measured] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, DeviceKind] = dataclasses.field(default_factory=dict)
    efficiency: Mapping[str, Efficiency] = dataclasses.field(default_factory=dict)
    calls: Mapping[tuple[str, int], CallTime] = dataclasses.field(default_factory=dict)
    hosts: Mapping[str, HostTime] = dataclasses.field(default_factory=dict)
    links: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    layers: Profiles = dataclasses.field(default_factory=Profiles)

    def adding(self, *measured: Measured) -> ProfileStore:
        """Returns the store with more measurements."""
        return dataclasses.replace(self, measured={**self.measured, **{m.key: m for m in measured}})

    def merged(self, other: ProfileStore) -> ProfileStore:
        """Returns both stores as one; where both measured the same, the other's number."""
        merge: Callable[[str], Any] = lambda name: {**getattr(self, name), **getattr(other, name)}  # noqa: E731
        names = ("measured", "kinds", "efficiency", "calls", "hosts", "links")
        return ProfileStore(**{n: merge(n) for n in names}, layers=self.layers.merged(other.layers))

    def disagreements(self, other: ProfileStore) -> list[str]:
        """Returns a sentence per work that both measured, with results more than 20 % apart."""
        out = []
        for key, mine in self.measured.items():
            theirs = other.measured.get(key)
            if theirs is None or mine.source != "measured":
                continue
            ratio = theirs.seconds / mine.seconds
            if abs(math.log(ratio)) > math.log1p(DIFFER):
                out.append(
                    f"{mine.layer} {mine.phase} on {mine.kind} ({mine.data} x {mine.model}, "
                    f"microbatch {mine.microbatch}): {mine.seconds:.3g} s in {mine.cluster or 'one file'}, "
                    f"{theirs.seconds:.3g} s in {theirs.cluster or 'the other'} ({ratio - 1:+.0%})"
                )
        return out

    def net_s(self, m: Measured) -> float:
        """Returns what a measured call took beyond what any call with its arrays takes.

        Never less than a fifth of it: of a call that computes next to nothing, little is known.
        """
        call = self.calls.get((m.kind, m.data * m.model))
        return m.seconds if call is None else max(m.seconds - call.seconds(m.arrays), m.seconds / 5)

    def samples(self) -> list[Sample]:
        """Returns what a residual forest is trained from: every measured layer of a described kind."""
        return [
            Sample(
                m.work, self.kinds[m.kind], m.group, self.net_s(m), m.cluster,
                self.efficiency.get(m.kind),
            )
            for m in self.measured.values()
            if m.kind in self.kinds and m.work.kernels
        ]  # fmt: skip

    # Text.

    def to_json(self) -> str:
        """Returns JSON that reads back to an equal store."""
        rows = lambda items: "[\n" + ",\n".join(map(_dump, items)) + "\n]"  # noqa: E731
        layers = [{**dataclasses.asdict(k), **dataclasses.asdict(t)} for k, t in self.layers]
        calls = [{"kind": k, "devices": n, **dataclasses.asdict(c)} for (k, n), c in self.calls.items()]
        plain = {
            "kinds": {n: dataclasses.asdict(k) for n, k in self.kinds.items()},
            "efficiency": {n: dataclasses.asdict(e) for n, e in self.efficiency.items()},
            "calls": calls,
            "hosts": {n: dataclasses.asdict(h) for n, h in self.hosts.items()},
            "links": {n: dataclasses.asdict(x) for n, x in self.links.items()},
        }
        parts = [f'"hetjax_profiles": {VERSION}', *(f'"{n}": {_dump(v)}' for n, v in plain.items())]
        parts += [
            f'"measured": {rows(_measured_row(m) for m in self.measured.values())}',
            f'"layers": {rows(layers)}',
        ]
        return "{" + ",\n".join(parts) + "}\n"

    @classmethod
    def from_json(cls, text: str, filename: str = "<json>") -> ProfileStore:
        """Returns the store that JSON text holds; parts may be absent.

        Raises:
          ParseError: the text is not JSON.
          PlanError: it holds no profiles; every problem with its key.
        """
        data = parse_json(text, filename)
        if not isinstance(data, dict) or data.get("hetjax_profiles") != VERSION:
            raise PlanError(f'{filename}: not profiles; they say "hetjax_profiles": {VERSION}')
        problems = [
            f"{filename}: {name}: unknown field{nearest(name, _FIELDS)}" for name in data if name not in _FIELDS
        ]
        found: dict[str, Any] = {}
        for name, read in _FIELDS.items():
            if read is not None and name in data:
                try:
                    found[name] = read(data[name])
                except _Wrong as error:
                    problems.append(f"{filename}: {name}{error}")
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    problems.append(f"{filename}: {name}: not as it should be ({error!r})")
        layers = Profiles()
        if "layers" in data:
            try:
                rows = {"hetjax_profiles": VERSION, "layers": data["layers"]}
                layers = Profiles.from_json(json.dumps(rows), filename)
            except PlanError as error:
                problems += str(error).splitlines()
        if problems:
            raise PlanError(problems)
        return cls(**found, layers=layers)

    @classmethod
    def load(cls, path: str | Path) -> ProfileStore:
        """Returns the store in a JSON file.

        Raises:
          PlanError: the file cannot be read or holds no profiles.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the profiles {path}: {error}") from None
        return cls.from_json(text, str(path))

    def save(self, path: str | Path) -> None:
        """Writes the store to a file in one piece: a process that is killed leaves the old file.

        Raises:
          PlanError: the file cannot be written.
        """
        path = Path(path)
        name = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file:
                name = file.name
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except OSError as error:
            if name is not None:
                with contextlib.suppress(OSError):
                    os.unlink(name)
            raise PlanError(f"cannot write the profiles {path}: {error}") from None


def store_digest(path: str | Path) -> str:
    """Returns what tells a store's content from another's.

    Raises:
      PlanError: the file cannot be read or holds no profiles.
    """
    return hashlib.sha256(ProfileStore.load(path).to_json().encode()).hexdigest()


def update_store(path: str | Path, change: Callable[[ProfileStore], ProfileStore]) -> ProfileStore:
    """Changes a store's file under a lock, so that two processes that measure at once both keep theirs.

    Args:
      path: the file; made when it is not there.
      change: of the store as it is now.

    Returns:
      the store as it was written.

    Raises:
      PlanError: the file cannot be read or written, or holds no profiles.
    """
    path = Path(path)
    with _locked(path):
        store = change(ProfileStore.load(path) if path.exists() else ProfileStore())
        store.save(path)
    return store


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.parent / f".{path.name}.lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise PlanError(f"cannot write the profiles {path}: {error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


class _Wrong(ValueError):
    """What is wrong, after the name of the part: "[3].seconds: must be …"."""


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _measured_row(m: Measured) -> dict[str, Any]:
    row = {f.name: getattr(m, f.name) for f in dataclasses.fields(m)}
    link = dataclasses.asdict(m.link) if m.link is not None else None
    return {**row, "work": m.work.to_row(), "link": link}


def _read_link(row: Mapping[str, Any]) -> Link:
    _check_fields(row, Link)
    curve = tuple((int(n), float(b)) for n, b in row["curve"])
    if row["bandwidth_bytes_s"] <= 0 or any(b <= 0 for _, b in curve):
        raise _Wrong(".bandwidth_bytes_s and .curve: must be above 0")
    return Link(**{**row, "between": tuple(row["between"]), "curve": curve})


def _read_kind(row: Mapping[str, Any]) -> DeviceKind:
    _check_fields(row, DeviceKind)
    lists = {n: tuple(row[n]) for n in ("emulated_dtypes", "device_kinds")}
    peaks = tuple((str(d), float(v)) for d, v in row["peak_flops"])
    return DeviceKind(**{**row, **lists, "peak_flops": peaks})


def _read_efficiency(row: Mapping[str, Any]) -> Efficiency:
    _check_fields(row, Efficiency)
    return Efficiency(**{**row, "tops": tuple((str(d), float(v)) for d, v in row["tops"])})


def _read_calls(rows: Any) -> dict[tuple[str, int], CallTime]:
    out = {}
    for i, r in enumerate(rows):
        try:
            _check_fields({k: v for k, v in r.items() if k not in ("kind", "devices")}, CallTime)
        except _Wrong as error:
            raise _Wrong(f"[{i}]{error}") from None
        time = CallTime(float(r["base_s"]), float(r["array_s"]))
        out[str(r["kind"]), int(r["devices"])] = time
    return out


def _read_host(row: Any) -> HostTime:
    # Stores of earlier versions hold the number of processors alone.
    if isinstance(row, int):
        return HostTime(processors=row)
    _check_fields(row, HostTime)
    return HostTime(**row)


def _check_fields(row: Mapping[str, Any], cls: type) -> None:
    """Refuses fields a dataclass has not, and numbers below 0.

    Raises:
      _Wrong: says which field, and the nearest there is.
    """
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    for key, value in row.items():
        if key not in fields:
            raise _Wrong(f".{key}: unknown field{nearest(key, list(fields))}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if fields[key] in ("float", "int") and not (number and value >= 0):
            raise _Wrong(f".{key}: must be a number, at least 0, not {value!r}")


def _by_name(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def read_all(rows: Any) -> dict[str, Any]:
        out = {}
        for name, row in rows.items():
            try:
                out[str(name)] = read(row)
            except _Wrong as error:
                raise _Wrong(f".{name}{error}") from None
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise _Wrong(f".{name}: not as it should be ({error})") from None
        return out

    return read_all


_NUMBERS = {
    "seconds": (float, "a number of seconds above 0"), "host_s": (float, "a number of seconds"),
    "spread": (float, "a number"), "data": (int, "a whole number"), "model": (int, "a whole number"),
    "nodes": (int, "a whole number"), "microbatch": (int, "a whole number"),
    "runs": (int, "a whole number"), "arrays": (int, "a whole number"),
}  # fmt: skip
_LEAST = {"seconds": 1e-12, "data": 1, "model": 1, "nodes": 1}


def _read_measured(rows: Any) -> dict[MeasuredKey, Measured]:
    if not isinstance(rows, list):
        raise _Wrong(": must be a list")
    known = {f.name for f in dataclasses.fields(Measured)}
    needed = ("signature", "kind", "phase", "seconds", "work")
    out = {}
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise _Wrong(f"[{i}]: must be an object")
        for name in row:
            if name not in known:
                raise _Wrong(f"[{i}].{name}: unknown field{nearest(name, known)}")
        for name in needed:
            if name not in row:
                raise _Wrong(f"[{i}].{name}: missing field")
        for name, (kind, words) in _NUMBERS.items():
            value = row.get(name, 1)
            good = isinstance(value, (int, kind)) and not isinstance(value, bool)
            if not (good and _LEAST.get(name, 0) <= value < math.inf):
                raise _Wrong(f"[{i}].{name}: must be {words}, not {value!r}")
        for name, choices in (("phase", WORK_PHASES), ("source", SOURCES)):
            value = row.get(name, choices[0])
            if value not in choices:
                raise _Wrong(f"[{i}].{name}: unknown {name} {value!r}{nearest(str(value), choices)}")
        try:
            work = Work.from_row(row["work"])
            link = None if row.get("link") is None else _read_link(row["link"])
        except _Wrong as error:
            raise _Wrong(f"[{i}].link{error}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise _Wrong(f"[{i}]: work or link is not as it should be ({error!r})") from None
        m = Measured(**{**row, "work": work, "link": link})
        out[m.key] = m
    return out


_FIELDS: dict[str, Callable[[Any], Any] | None] = {
    "hetjax_profiles": None,
    "layers": None,
    "kinds": _by_name(_read_kind),
    "efficiency": _by_name(_read_efficiency),
    "calls": _read_calls,
    "hosts": _by_name(_read_host),
    "links": _by_name(_read_link),
    "measured": _read_measured,
}
