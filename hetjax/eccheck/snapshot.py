"""A tree at one moment: what its leaves are, and views of their bytes, nothing serialised.

JAX arrays do not change, so on a host platform they are held and read later: holding a view keeps
XLA from reusing the buffer even if the array is donated the next moment. On an accelerator the bytes
are brought to the host before `take` returns. What can change in place (numpy arrays) is copied at
once.

A leaf is described by (JSON):

    p   path: [[kind, key], ...], kind "d" dict, "s" sequence, "a" attribute, "f" flat index
    t   "jax", "key" (typed PRNG key), "np", "py", "none", "file"
    d s dtype and global shape ("jax", "key", "np")
    w   weak type; i: PRNG implementation; g: a numpy scalar; h: sharding, if it has a name
    x   shards: [writer, offset, bytes, [[start, stop] per dimension]]
    v   the value of a "py" leaf
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetjax.ir.errors import CheckpointError

ALIGN_BYTES = 64
Path = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Snapshot:
    """The leaves of a tree and the bytes this process contributes.

    Attributes:
      leaves: descriptions, with the shards of this process.
      segments: (offset in this process's bytes, uint8 view), ascending.
      total_bytes: length of this process's bytes.
    """

    leaves: list[dict[str, Any]]
    segments: list[tuple[int, np.ndarray]]
    total_bytes: int

    def piece(self, offset: int, num_bytes: int) -> np.ndarray:
        """Returns bytes of this process: a view where they lie together, else a copy.

        Beyond the end and between segments there are zeros; the result may be shorter than asked
        for where it reaches the end.
        """
        stop = min(offset + num_bytes, self.total_bytes)
        at = bisect.bisect_right(self.segments, offset, key=lambda s: s[0]) - 1
        if at >= 0:
            start, view = self.segments[at]
            if start + len(view) >= stop:
                return view[offset - start : stop - start]
        out = np.zeros(max(0, stop - offset), np.uint8)
        for start, view in self.segments[max(at, 0) :]:
            if start >= stop:
                break
            low, high = max(start, offset), min(start + len(view), stop)
            if low < high:
                out[low - offset : high - offset] = view[low - start : high - start]
        return out


def path_of(keys: Sequence[Any]) -> Path:
    """Returns a JAX key path as plain (kind, key) pairs."""
    import jax

    tree, path = jax.tree_util, []
    for key in keys:
        if isinstance(key, tree.DictKey):
            path.append(("d", key.key if isinstance(key.key, (str, int)) else str(key.key)))
        elif isinstance(key, tree.SequenceKey):
            path.append(("s", key.idx))
        elif isinstance(key, tree.GetAttrKey):
            path.append(("a", key.name))
        elif isinstance(key, tree.FlattenedIndexKey):
            path.append(("f", key.key))
        else:
            path.append(("d", str(key)))
    return tuple(path)


def path_name(path: Sequence[Sequence[Any]]) -> str:
    """Returns a path for messages, as `params/dense/kernel`."""
    return "/".join(str(key) for _, key in path) or "(root)"


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of a contiguous array as uint8, without a copy."""
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def dtype_name(dtype: np.dtype) -> str:
    """Returns a name that `named_dtype` understands, also for bfloat16, int4, float8 and the like."""
    import ml_dtypes

    # The str of bfloat16 and its like means raw bytes or nothing at all.
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def named_dtype(name: str) -> np.dtype:
    """Returns the dtype of a name.

    Raises:
      CheckpointError: this installation does not know it.
    """
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        scalar = getattr(ml_dtypes, name, None)
        if scalar is None:
            raise CheckpointError(f"the dtype {name} is not known here; update ml_dtypes") from None
        return np.dtype(scalar)


def describe_sharding(sharding: Any) -> dict[str, Any] | None:
    """Returns a named sharding as JSON, or None for other kinds."""
    import jax

    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh = sharding.mesh
    if not isinstance(mesh, jax.sharding.Mesh):
        return None
    spec = [
        [entry] if isinstance(entry, str) else list(entry) if isinstance(entry, tuple) else None
        for entry in sharding.spec
    ]
    return {
        "shape": list(mesh.devices.shape), "names": list(mesh.axis_names), "spec": spec,
        "types": [getattr(t, "name", str(t)) for t in mesh.axis_types],
        "ids": [int(d.id) for d in mesh.devices.flat],
    }


def python_value(value: Any) -> Any:
    """Returns a Python leaf as JSON, or raises TypeError."""
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(type(value).__name__)


def from_python_value(value: Any) -> Any:
    """Returns what `python_value` was given."""
    if isinstance(value, dict):
        return complex(*value["complex"]) if "complex" in value else bytes.fromhex(value["bytes"])
    return value


class _Builder:
    def __init__(self, writer: int):
        self.writer, self.offset = writer, 0
        self.segments: list[tuple[int, np.ndarray]] = []
        self._seen: dict[int, list[list[Any]]] = {}
        self._keep: list[Any] = []

    def add(self, data: np.ndarray, index: list[list[int]]) -> list[Any]:
        """Takes bytes; returns their shard entry."""
        entry = [self.writer, self.offset, len(data), index]
        if len(data):
            self.segments.append((self.offset, data))
            self.offset += -(-len(data) // ALIGN_BYTES) * ALIGN_BYTES
        return entry

    def once(self, value: Any, make: Any) -> list[list[Any]]:
        """Returns the shards of a value; tied leaves are stored once."""
        known = self._seen.get(id(value))
        if known is None:
            known = self._seen[id(value)] = make()
            self._keep.append(value)  # or the id could be taken again
        return known


def _full(shape: Sequence[int]) -> list[list[int]]:
    return [[0, int(d)] for d in shape]


def take(
    tree: Any, *, writer: int = 0, count: int = 1, shared: bool = True,
    files: Mapping[Path, bytes] | None = None,
) -> Snapshot:
    """Returns the state of a tree now.

    Args:
      tree: a pytree of jax arrays (typed keys included), numpy arrays and scalars, Python numbers,
        strings and None.
      writer: number of this process.
      count: processes that save together.
      shared: whether they are one jax.distributed job, where host values are equal in all and only
        the first stores them.
      files: contents of files that travel with the tree, by path.

    Raises:
      CheckpointError: leaves of another type, all of them named.
    """
    import jax

    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    problems = []
    for keys, leaf in flat:
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                problems.append(f"{path_name(path_of(keys))}: the array was deleted or donated")
        elif isinstance(leaf, (np.ndarray, np.generic)):
            if leaf.dtype.hasobject:
                problems.append(f"{path_name(path_of(keys))}: numpy array of dtype object")
            elif leaf.dtype.fields:
                problems.append(f"{path_name(path_of(keys))}: numpy array of records")
        elif leaf is not None:
            try:
                python_value(leaf)
            except TypeError as error:
                problems.append(f"{path_name(path_of(keys))}: {error}")
    if problems:
        raise CheckpointError(
            "these leaves cannot be checkpointed: " + "; ".join(problems)
            + ". Arrays, numbers, strings and None can; save others as an item of their own"
        )
    for _, leaf in flat:
        if isinstance(leaf, jax.Array):
            data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
            if _platform(data) != "cpu":
                for shard in data.addressable_shards:
                    if shard.replica_id == 0:
                        shard.data.copy_to_host_async()
    builder, leaves = _Builder(writer), []
    for keys, leaf in flat:
        entry: dict[str, Any] = {"p": [list(part) for part in path_of(keys)]}
        leaves.append(entry)
        if leaf is None:
            entry["t"] = "none"
        elif isinstance(leaf, jax.Array):
            _take_jax(leaf, entry, builder, writer, count, shared)
        elif isinstance(leaf, (np.ndarray, np.generic)):
            array = np.array(leaf, order="C", copy=True)
            entry.update(t="np", d=dtype_name(array.dtype), s=list(array.shape))
            if isinstance(leaf, np.generic):
                entry["g"] = True
            mine = writer == 0 or not shared
            entry["x"] = builder.once(
                leaf, lambda a=array: [builder.add(as_bytes(a), _full(a.shape))]
            ) if mine else []
        else:
            entry.update(t="py", v=python_value(leaf))
    for path, content in (files or {}).items():
        data = np.frombuffer(content, np.uint8)
        leaves.append({
            "p": [list(part) for part in path], "t": "file", "d": "|u1", "s": [len(data)],
            "x": [builder.add(data, _full(data.shape))],
        })
    return Snapshot(leaves, builder.segments, builder.offset)


def _is_key(leaf: Any) -> bool:
    import jax

    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _platform(leaf: Any) -> str:
    return next(iter(leaf.sharding.device_set)).platform


def _take_jax(
    leaf: Any, entry: dict[str, Any], builder: _Builder, writer: int, count: int, shared: bool
) -> None:
    import jax

    entry["t"], data = "jax", leaf
    if _is_key(leaf):
        data = jax.random.key_data(leaf)
        entry.update(t="key", i=str(jax.random.key_impl(leaf)))
    entry.update(d=dtype_name(np.dtype(data.dtype)), s=list(data.shape))
    if getattr(data.aval, "weak_type", False):
        entry["w"] = True
    sharding = describe_sharding(leaf.sharding)
    if sharding is not None:
        entry["h"] = sharding

    def shards() -> list[list[Any]]:
        if shared and count > 1 and data.is_fully_addressable and writer != 0:
            return []  # equal in every process
        taken = []
        for shard in data.addressable_shards:
            if shard.replica_id:
                continue
            index = [
                [s.start or 0, d if s.stop is None else s.stop]
                for s, d in zip(shard.index, data.shape)
            ]
            # A view on CPU, the finished transfer elsewhere.
            taken.append(builder.add(as_bytes(np.asarray(shard.data)), index))
        return taken

    entry["x"] = builder.once(leaf, shards)


def merge_leaves(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the leaves of all writers as one list, shards joined by path.

    Raises:
      CheckpointError: writers disagree about a leaf's shape or dtype.
    """
    merged: dict[str, dict[str, Any]] = {}
    problems = []
    for part in parts:
        for leaf in part:
            key = repr(leaf["p"])
            if leaf["t"] == "file" and key in merged:
                continue  # the same file from two processes: the first holds
            known = merged.setdefault(key, {**leaf, "x": []} if "x" in leaf else dict(leaf))
            if any(known.get(f) != leaf.get(f) for f in ("t", "d", "s", "i")):
                problems.append(
                    f"{path_name(leaf['p'])}: {known.get('d')}{known.get('s')} here, "
                    f"{leaf.get('d')}{leaf.get('s')} there"
                )
            have = {repr(s[3]) for s in known.get("x", ())}
            for shard in leaf.get("x", ()):
                if repr(shard[3]) not in have:
                    known["x"].append(shard)
    if problems:
        raise CheckpointError("the processes of the save disagree: " + "; ".join(problems))
    incomplete = [
        path_name(leaf["p"]) for leaf in merged.values()
        if "x" in leaf and sum(math.prod(b - a for a, b in s[3]) for s in leaf["x"])
        != math.prod(leaf["s"])
    ]
    if incomplete:
        raise CheckpointError(
            f"no process has some shards of: {', '.join(incomplete)}; every process must save"
        )
    return list(merged.values())
