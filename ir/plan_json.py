"""Plans out of JSON, with every problem named by its key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from hetjax.ir.errors import ParseError, PlanError
from hetjax.ir.json_text import parse_json
from hetjax.ir.plan import CROSSING_DTYPES, SOURCES, SUMS, VERSION, Cut, Plan, StagePlan
from hetjax.ir.suggest import nearest

_ABSENT = object()


class _Wrong(Exception):
    """A value that cannot be used; the problem is already noted."""


class _Problems:
    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, key: str, sentence: str) -> None:
        self.found.append(f"{key}: {sentence}" if key else sentence)

    def wrong(self, key: str, expected: str, value: Any) -> _Wrong:
        self.add(key, f"must be {expected}, not {json.dumps(value)[:60]}")
        return _Wrong()


_Read = Callable[[Any, str, _Problems], Any]


def read_plan(text: str, filename: str) -> Plan:
    """Returns the plan that JSON text holds; see `Plan.from_json`."""
    try:
        data = parse_json(text, filename, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ParseError(str(error), filename=filename) from None
    problems = _Problems()
    plan = None
    if not isinstance(data, dict):
        problems.add("", f"a plan is a JSON object, not {json.dumps(data)[:60]}")
    elif "hetjax_plan" not in data:
        problems.add("hetjax_plan", f'missing; a plan says "hetjax_plan": {VERSION}')
    elif data["hetjax_plan"] != VERSION or isinstance(data["hetjax_plan"], bool):
        problems.add(
            "hetjax_plan",
            f"version {data['hetjax_plan']!r} is not known; this hetjax reads version {VERSION}",
        )
    else:
        fields = {k: v for k, v in data.items() if k != "hetjax_plan"}
        plan = _record(Plan, _PLAN)(fields, "", problems)
    if problems.found or plan is None:
        raise PlanError([f"{filename}: {p}" for p in problems.found])
    return plan


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number a plan may hold")


def _typed(
    expected: str, accept: Callable[[Any], bool], convert: Callable[[Any], Any] = lambda v: v
) -> _Read:
    def read(value: Any, key: str, problems: _Problems) -> Any:
        if not accept(value):
            raise problems.wrong(key, expected, value)
        return convert(value)

    return read


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_text = _typed("a string", lambda v: isinstance(v, str))
_whole = _typed("a whole number of at least 0", lambda v: _is_int(v) and v >= 0)
_flag = _typed("true or false", lambda v: isinstance(v, bool))
_seconds = _typed(
    "a number of seconds, at least 0",
    # A whole number beyond 1e300 is no float.
    lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v <= 10**300,
    float,
)


def _source(value: Any, key: str, problems: _Problems) -> str:
    if value not in SOURCES:
        problems.add(key, f"unknown source {value!r}{nearest(str(value), SOURCES)}")
        raise _Wrong()
    return value


def _crossing_dtype(value: Any, key: str, problems: _Problems) -> str:
    if value != "" and value not in CROSSING_DTYPES:
        problems.add(key, f"activations cannot cross in {value!r}{nearest(str(value), CROSSING_DTYPES)}")
        raise _Wrong()
    return value


def _sums(value: Any, key: str, problems: _Problems) -> str:
    if value not in SUMS:
        problems.add(key, f"sums are made in parts ('') or 'whole', not {value!r}{nearest(str(value), SUMS)}")
        raise _Wrong()
    return value


def _optional(read: _Read) -> _Read:
    return lambda value, key, problems: None if value is None else read(value, key, problems)


def _many(read: _Read) -> _Read:
    def read_all(value: Any, key: str, problems: _Problems) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise problems.wrong(key, "a list", value)
        out, bad = [], False
        for i, item in enumerate(value):
            try:
                out.append(read(item, f"{key}[{i}]", problems))
            except _Wrong:
                bad = True
        if bad:
            raise _Wrong()
        return tuple(out)

    return read_all


def _pair(first: _Read, second: _Read) -> _Read:
    def read(value: Any, key: str, problems: _Problems) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            raise problems.wrong(key, "a pair", value)
        return first(value[0], f"{key}[0]", problems), second(value[1], f"{key}[1]", problems)

    return read


def _record(cls: Any, fields: dict[str, _Read]) -> _Read:
    def read(value: Any, key: str, problems: _Problems) -> Any:
        if not isinstance(value, dict):
            raise problems.wrong(key, "an object", value)
        at = f"{key}." if key else ""
        for name in value:
            if name not in fields:
                problems.add(at + name, f"unknown field{nearest(name, fields)}")
        out: dict[str, Any] = {}
        bad = False
        for field in dataclasses.fields(cls):
            item = value.get(field.name, _ABSENT)
            if item is _ABSENT:
                if field.default is dataclasses.MISSING:
                    problems.add(at + field.name, "missing field")
                    bad = True
                continue
            try:
                out[field.name] = fields[field.name](item, at + field.name, problems)
            except _Wrong:
                bad = True
        if bad:
            raise _Wrong()
        return cls(**out)

    def guarded(value: Any, key: str, problems: _Problems) -> Any:
        if key:
            return read(value, key, problems)
        try:
            return read(value, key, problems)
        except _Wrong:
            return None

    return guarded


_CUT: dict[str, _Read] = {"block": _text, "offset": _whole}
_STAGE: dict[str, _Read] = {
    "devices": _many(_whole),
    "site": _text,
    "kind": _text,
    "axes": _many(_pair(_text, _whole)),
    "first": _optional(_record(Cut, _CUT)),
    "blocks": _many(_text),
    "predicted_s": _optional(_seconds),
    "peak_bytes": _optional(_whole),
    "sent_bytes": _optional(_whole),
    "sequence": _flag,
}
_PLAN: dict[str, _Read] = {
    "name": _text,
    "cluster": _text,
    "cluster_hash": _text,
    "num_microbatches": _whole,
    "batch_size": _whole,
    "schedule": _text,
    "stages": _many(_record(StagePlan, _STAGE)),
    "warmups": _many(_whole),
    "per_microbatch": _flag,
    "state_specs": _many(_pair(_text, _many(_many(_text)))),
    "layer_edges": _many(_many(_whole)),
    "recompute": _text,
    "recompute_stages": _many(_whole),
    "microbatch_reason": _text,
    "seed": _optional(_whole),
    "evaluations": _optional(_whole),
    "sources": _many(_pair(_text, _source)),
    "predicted_s": _optional(_seconds),
    "crossing_dtype": _crossing_dtype,
    "sums": _sums,
}
