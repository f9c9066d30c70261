"""Measured seconds of a model's layers, by device kind, tensor-parallel degree and microbatch size.

As JSON (`hetjax_profiles` is the version of the form):

  {"hetjax_profiles": 1,
   "layers": [{"model": "gpt", "kind": "a100-80g", "tensor": 2, "microbatch": 4, "layer": "block_3",
               "forward_s": 0.0031, "backward_s": 0.0062, "update_s": 0.0004,
               "source": "measured"}]}
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hetjax.ir.errors import PlanError
from hetjax.ir.json_text import parse_json
from hetjax.ir.plan import SOURCES
from hetjax.ir.suggest import nearest

VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKey:
    """What a measurement is of.

    Attributes:
      model: the model's name.
      kind: the device kind's name.
      tensor: devices that share the layer.
      microbatch: examples.
      layer: the layer's name.
    """

    model: str
    kind: str
    tensor: int
    microbatch: int
    layer: str


@dataclasses.dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer.

    Attributes:
      forward_s, backward_s: of one microbatch.
      update_s: of the optimizer, once a step.
      source: one of `hetjax.ir.plan.SOURCES`.
    """

    forward_s: float
    backward_s: float
    update_s: float
    source: str = "measured"


class Profiles:
    """A table of `LayerTime` by `LayerKey`; later entries replace earlier ones."""

    def __init__(self, entries: Iterable[tuple[LayerKey, LayerTime]] = ()):
        self._times = dict(entries)
        self._repaired: Profiles | None = None

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[tuple[LayerKey, LayerTime]]:
        return iter(self._times.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profiles) and self._times == other._times

    def __hash__(self) -> int:
        return hash(frozenset(self._times.items()))

    def merged(self, other: Profiles) -> Profiles:
        """Returns both tables as one; the other's entries win."""
        return Profiles([*self, *other])

    def time(self, key: LayerKey) -> LayerTime:
        """Returns the measurement of a key.

        Raises:
          PlanError: there is none; says which model, kind, degree, size or layer is missing, and
            what there is.
        """
        if key in self._times:
            return self._times[key]
        known = list(self._times)
        for field in ("model", "kind", "tensor", "microbatch", "layer"):
            values = {getattr(k, field) for k in known}
            wanted = getattr(key, field)
            if wanted not in values:
                there = ", ".join(map(str, sorted(values)))
                hint = (
                    nearest(wanted, values) if isinstance(wanted, str) else f"; there is: {there}"
                )
                raise PlanError(f"no profile of {_words(key)}: no {field} {wanted!r}{hint}")
            known = [k for k in known if getattr(k, field) == wanted]
        raise PlanError(f"no profile of {_words(key)}")

    def repaired(self) -> Profiles:
        """Returns the table with times that never fall as the microbatch grows.

        A layer does no more for fewer examples, so a longer time for fewer is the measurement's
        noise, which only ever adds: forward and backward of a size become the least of it and all
        larger ones.
        """
        if self._repaired is not None:
            return self._repaired
        rows: dict[tuple[str, str, int, str], list[int]] = {}
        for k in self._times:
            rows.setdefault((k.model, k.kind, k.tensor, k.layer), []).append(k.microbatch)
        out = {}
        for (model, kind, tensor, layer), sizes in rows.items():
            forward_s = backward_s = math.inf
            for size in sorted(sizes, reverse=True):
                key = LayerKey(model, kind, tensor, size, layer)
                time = self._times[key]
                forward_s = min(forward_s, time.forward_s)
                backward_s = min(backward_s, time.backward_s)
                out[key] = dataclasses.replace(time, forward_s=forward_s, backward_s=backward_s)
        self._repaired = Profiles((key, out[key]) for key in self._times)
        return self._repaired

    # Text.

    def to_json(self) -> str:
        """Returns JSON that reads back to an equal table."""
        layers = [{**dataclasses.asdict(k), **dataclasses.asdict(t)} for k, t in self]
        rows = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in layers)
        return f'{{"hetjax_profiles": {VERSION}, "layers": [\n{rows}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, filename: str = "<json>") -> Profiles:
        """Returns the table that JSON text holds.

        Raises:
          ParseError: the text is not JSON.
          PlanError: it holds no profiles; every problem with its key.
        """
        data = parse_json(text, filename)
        if not isinstance(data, dict) or data.get("hetjax_profiles") != VERSION:
            raise PlanError(f'{filename}: not profiles; they say "hetjax_profiles": {VERSION}')
        problems: list[str] = []
        entries = []
        rows = data.get("layers")
        for i, row in enumerate(rows if isinstance(rows, list) else []):
            problems += (found := [f"{filename}: layers[{i}]{p}" for p in _problems(row)])
            if not found:
                entries.append(_entry(row))
        if not isinstance(rows, list):
            problems.append(f"{filename}: layers: must be a list")
        if problems:
            raise PlanError(problems)
        return cls(entries)

    @classmethod
    def load(cls, path: str | Path) -> Profiles:
        """Returns the table in a JSON file.

        Raises:
          PlanError: the file cannot be read or holds no profiles.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the profiles {path}: {error}") from None
        return cls.from_json(text, str(path))


_KEY_FIELDS = {f.name: f.type for f in dataclasses.fields(LayerKey)}
_TIME_FIELDS = ("forward_s", "backward_s", "update_s")


def _problems(row: Any) -> Iterator[str]:
    if not isinstance(row, dict):
        yield f": must be an object, not {json.dumps(row)[:40]}"
        return
    known = (*_KEY_FIELDS, *_TIME_FIELDS, "source")
    for name in row:
        if name not in known:
            yield f".{name}: unknown field{nearest(name, known)}"
    for name, kind in _KEY_FIELDS.items():
        value = row.get(name)
        if kind == "str" and not isinstance(value, str):
            yield f".{name}: must be a string"
        elif kind == "int" and not (type(value) is int and value >= 1):
            yield f".{name}: must be a whole number of at least 1"
    for name in _TIME_FIELDS:
        value = row.get(name)
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else -1.0
        if not 0 <= number < math.inf:
            yield f".{name}: must be a number of seconds, at least 0"
    if row.get("source", "measured") not in SOURCES:
        yield f".source: unknown source{nearest(str(row['source']), SOURCES)}"


def _entry(row: dict[str, Any]) -> tuple[LayerKey, LayerTime]:
    key = LayerKey(**{name: row[name] for name in _KEY_FIELDS})
    times = {name: float(row[name]) for name in _TIME_FIELDS}
    return key, LayerTime(**times, source=row.get("source", "measured"))


def _words(key: LayerKey) -> str:
    return (
        f"layer {key.layer} of {key.model} on {key.kind}, {key.tensor}-way tensor parallel, "
        f"microbatch {key.microbatch}"
    )
