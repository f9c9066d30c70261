"""Turns an object's bytes back into a tree: any mesh, any number of processes, any part of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hetjax.eccheck.manifest import Manifest
from hetjax.eccheck.reader import Range
from hetjax.eccheck.snapshot import (
    as_bytes,
    from_python_value,
    named_dtype,
    path_name,
    path_of,
)
from hetjax.ir.errors import CheckpointError

PLACEHOLDER = ...  # orbax's mark for a leaf that is not wanted


@dataclasses.dataclass(frozen=True)
class Wish:
    """How one leaf is wanted.

    Attributes:
      kind: "jax", "np", "scalar" (a Python number), "any" (as it was saved).
      sharding: for "jax": where it goes; None for as it was saved, or the first device.
      dtype: cast to this, or None.
      shape: expected shape, or None to accept any.
      truncate: accept another shape by cutting or zero-padding.
    """

    kind: str = "any"
    sharding: Any = None
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    truncate: bool = False


class Reads(Protocol):
    """Where the bytes of leaves come from."""

    def read(self, ranges: Iterable[Range]) -> None:
        """Fills the destinations."""


class Whole(Reads, Protocol):
    """A whole object: its bytes, and what they are."""

    manifest: Manifest


def empty_aligned(num_bytes: int) -> np.ndarray:
    """Returns uint8 memory that begins on a 64-byte boundary, so that JAX on CPU takes it as it is.

    From numpy, which asks for huge pages, and so from malloc, which gives again what an earlier tree
    left: mappings of its own, whole huge pages, made restores slower wherever a hypervisor takes back
    what was unmapped (0.56 s instead of 0.31 for 1 GiB, in turns).
    """
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


class _Leaf:
    """One leaf being read: which rows of which saved shards are needed, and where they go."""

    def __init__(self, meta: Mapping[str, Any]):
        self.meta = meta
        self.shape = tuple(int(d) for d in meta["s"])
        self.dtype = named_dtype(str(meta["d"]))
        self._rows: dict[int, tuple[int, int]] = {}  # shard -> rows wanted, in global numbering
        self.parts: list[tuple[list[tuple[int, int]], np.ndarray]] = []

    def need(self, index: Sequence[tuple[int, int]]) -> None:
        """Asks for part of the leaf.

        Of a saved shard the rows from the first to the last wanted one are read: they lie together.
        """
        for number, (_, _, length, saved) in enumerate(self.meta["x"]):
            overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(index, saved)]
            if length and all(a < b for a, b in overlap):
                low, high = overlap[0] if overlap else (0, 1)
                known = self._rows.get(number, (low, high))
                self._rows[number] = (min(low, known[0]), max(high, known[1]))

    def ranges(self) -> list[Range]:
        """Returns the bytes to read, and allocates what they go to."""
        ranges = []
        for number, (low, high) in self._rows.items():
            writer, offset, length, saved = self.meta["x"][number]
            box, begin, num_bytes = [(int(a), int(b)) for a, b in saved], 0, int(length)
            if box:
                row_bytes = num_bytes // (box[0][1] - box[0][0])
                begin, num_bytes = (low - box[0][0]) * row_bytes, (high - low) * row_bytes
                box[0] = (low, high)
            out = empty_aligned(num_bytes)
            self.parts.append((box, out))
            ranges.append(Range(int(writer), int(offset) + begin, out))
        return ranges

    def cut(self, index: Sequence[tuple[int, int]]) -> np.ndarray:
        """Returns part of the leaf as an array, once the ranges are read."""
        shape = [b - a for a, b in index]
        for box, out in self.parts:
            if list(index) == box:
                return out.view(self.dtype).reshape(shape)
        result = empty_aligned(math.prod(shape) * self.dtype.itemsize).view(self.dtype).reshape(shape)
        for box, out in self.parts:
            overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(index, box)]
            if any(a >= b for a, b in overlap):
                continue
            source = out.view(self.dtype).reshape([b - a for a, b in box])
            result[tuple(slice(a - i, b - i) for (a, b), (i, _) in zip(overlap, index))] = source[
                tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(overlap, box))
            ]
        return result


def _index(slices: Sequence[slice], shape: Sequence[int]) -> list[tuple[int, int]]:
    return [
        (s.start or 0, d if s.stop is None else s.stop) for s, d in zip(slices, shape)
    ]


def saved_sharding(meta: Mapping[str, Any]) -> Any:
    """Returns the sharding a leaf was saved with, where this process has those devices, or None."""
    import jax

    described = meta.get("h")
    if not described:
        return None
    devices = {d.id: d for d in jax.devices()}
    if any(i not in devices for i in described["ids"]):
        return None
    mesh = jax.sharding.Mesh(
        np.array([devices[i] for i in described["ids"]]).reshape(described["shape"]),
        tuple(described["names"]),
        axis_types=tuple(
            getattr(jax.sharding.AxisType, t, jax.sharding.AxisType.Auto) for t in described["types"]
        ),
    )
    spec = [tuple(e) if e and len(e) > 1 else e[0] if e else None for e in described["spec"]]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def restore_leaves(
    reader: Reads, wishes: Sequence[tuple[Mapping[str, Any], Wish]]
) -> list[Any]:
    """Returns the values of leaves, read together.

    Args:
      reader: the object.
      wishes: (description of the leaf, how it is wanted).

    Raises:
      CheckpointError: shapes do not match, all of them named; or bytes are lost.
    """
    import jax

    problems, plans = [], []
    for meta, wish in wishes:
        if meta["t"] not in ("jax", "key", "np"):
            if meta["t"] == "py" and wish.shape:
                problems.append(f"{path_name(meta['p'])}: saved a Python value, asked for {list(wish.shape)}")
            plans.append((meta, wish, None, None))
            continue
        leaf = _Leaf(meta)
        if wish.kind == "scalar" and math.prod(leaf.shape) != 1:
            problems.append(f"{path_name(meta['p'])}: saved {list(leaf.shape)}, asked for a number")
        if meta["t"] == "key" and _is_key_dtype(wish.dtype) and not _same_impl(meta["i"], wish.dtype):
            problems.append(f"{path_name(meta['p'])}: saved keys of {meta['i']}, asked for {wish.dtype}")
        kind, sharding = wish.kind, wish.sharding
        if kind == "any":
            kind = "np" if meta["t"] == "np" else "jax"
        shape = leaf.shape
        if wish.shape is not None:
            asked = tuple(wish.shape)
            saved = leaf.shape[:-1] if meta["t"] == "key" and _is_key_dtype(wish.dtype) else leaf.shape
            if asked != saved:
                if not wish.truncate or len(asked) != len(saved):
                    problems.append(f"{path_name(meta['p'])}: saved {list(saved)}, asked for {list(asked)}")
                    plans.append((meta, wish, None, None))
                    continue
                shape = asked
        if kind == "jax":
            if sharding is None:
                sharding = saved_sharding(meta) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
            sharding = _plain_sharding(sharding, meta, leaf)
            for slices in sharding.addressable_devices_indices_map(shape).values():
                leaf.need(_index(slices, shape))
        else:
            leaf.need([(0, d) for d in leaf.shape])
        plans.append((meta, wish, leaf, (kind, sharding, shape)))
    if problems:
        raise CheckpointError("what is asked for differs from the checkpoint: " + "; ".join(problems))
    reader.read(r for _, _, leaf, _ in plans if leaf is not None for r in leaf.ranges())
    return [_finish(*plan) for plan in plans]


def _is_key_dtype(dtype: Any) -> bool:
    import jax

    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _same_impl(saved: str, dtype: Any) -> bool:
    import jax

    return jax.random.key(0, impl=saved).dtype == dtype


def _plain_sharding(sharding: Any, meta: Mapping[str, Any], leaf: _Leaf) -> Any:
    """Returns a sharding for the stored array; a key's data have one dimension more than the key."""
    import jax

    sharding = getattr(sharding, "sharding", sharding) or sharding  # a Format carries its sharding
    if meta["t"] == "key" and isinstance(sharding, jax.sharding.NamedSharding):
        entries = list(sharding.spec) + [None] * (len(leaf.shape) - len(sharding.spec))
        return sharding.update(spec=jax.sharding.PartitionSpec(*entries[: len(leaf.shape)]))
    return sharding


def _finish(meta: Mapping[str, Any], wish: Wish, leaf: _Leaf | None, how: Any) -> Any:
    import jax

    if meta["t"] == "none":
        return None
    if leaf is None:
        value = from_python_value(meta["v"])
        if wish.kind == "np":
            return np.asarray(value)
        if wish.kind == "jax" and not isinstance(value, (str, bytes)):
            array = np.asarray(value, wish.dtype)
            return jax.device_put(array, wish.sharding) if wish.sharding is not None else jax.numpy.asarray(array)
        return value
    kind, sharding, shape = how
    if kind in ("np", "scalar"):
        array = leaf.cut([(0, d) for d in leaf.shape])
        if shape != leaf.shape:
            array = _resized(array, shape)
        if wish.dtype is not None and not _is_key_dtype(wish.dtype) and array.dtype != np.dtype(wish.dtype):
            array = array.astype(wish.dtype)
        if kind == "scalar":
            return array.item()
        return array[()] if meta.get("g") and wish.kind == "any" else array
    target = None if wish.dtype is None or _is_key_dtype(wish.dtype) else np.dtype(wish.dtype)

    def part(slices: Any) -> np.ndarray:
        index = _index(slices, shape)
        inside = [(min(a, d), min(b, d)) for (a, b), d in zip(index, leaf.shape)]
        piece = leaf.cut(inside)
        if inside != index:
            piece = _resized(piece, [b - a for a, b in index])
        return piece.astype(target) if target is not None and target != piece.dtype else piece

    if meta.get("w") and not shape and target in (None, leaf.dtype):
        weak = jax.numpy.asarray(part(()).item())  # a Python number gives a weak type
        if weak.dtype == leaf.dtype and np.asarray(weak).tobytes() == part(()).tobytes():
            return jax.device_put(weak, sharding)
    dtype = target if target is not None else leaf.dtype
    array = _assemble(shape, dtype, sharding, part)
    return jax.random.wrap_key_data(array, impl=meta["i"]) if meta["t"] == "key" else array


def _assemble(shape: Sequence[int], dtype: Any, sharding: Any, part: Any) -> Any:
    import jax

    if dtype.itemsize >= 8 and not jax.config.read("jax_enable_x64"):
        with jax.enable_x64(True):
            return jax.make_array_from_callback(tuple(shape), sharding, part)
    return jax.make_array_from_callback(tuple(shape), sharding, part)


def _resized(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    out = np.zeros(tuple(shape), array.dtype)
    common = tuple(slice(0, min(a, b)) for a, b in zip(array.shape, shape))
    out[common] = array[common]
    return out


def plain_key(path: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """Returns a path by its keys alone: attribute, dictionary and index access are the same."""
    return tuple(str(key) for _, key in path)


def by_key(leaves: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Returns leaves by their plain key."""
    return {plain_key(leaf["p"]): leaf for leaf in leaves}


def nest(leaves: Sequence[tuple[Sequence[Sequence[Any]], Any]]) -> Any:
    """Returns a tree of dictionaries and lists from (path, value) pairs."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    groups: dict[Any, list[tuple[Sequence[Sequence[Any]], Any]]] = {}
    kinds = set()
    for path, value in leaves:
        kinds.add(path[0][0])
        groups.setdefault(path[0][1], []).append((path[1:], value))
    children = {key: nest(items) for key, items in groups.items()}
    if kinds == {"s"}:
        return [children[i] for i in sorted(children)]
    return children


def restore_tree(
    reader: Whole, target: Any, wish_of: Any, *, only: str | None = None
) -> Any:
    """Returns a tree.

    Args:
      reader: the object.
      target: tree of arrays or abstract arrays, whole or a part of what was saved; None for all,
        as it was saved, in dictionaries and lists.
      wish_of: (key path, target leaf) -> Wish.
      only: the item of a composite that the tree is.

    Raises:
      CheckpointError: the target has leaves the checkpoint has not (all named), or bytes are lost.
    """
    import jax

    leaves = [leaf for leaf in reader.manifest.leaves if leaf["t"] != "file"]
    if only is not None:
        leaves = [{**leaf, "p": leaf["p"][1:]} for leaf in leaves if leaf["p"][0][1] == only]
    if target is None:
        values = restore_leaves(reader, [(leaf, Wish()) for leaf in leaves])
        return nest([(leaf["p"], value) for leaf, value in zip(leaves, values)])
    saved = by_key(leaves)
    flat, treedef = jax.tree_util.tree_flatten_with_path(target, is_leaf=lambda x: x is None)
    wanted, missing = [], []
    for keys, leaf in flat:
        if leaf is PLACEHOLDER:
            wanted.append(None)
            continue
        path = path_of(keys)
        meta = saved.get(plain_key(path))
        if leaf is None:  # as orbax does: None stays None, whatever was saved
            wanted.append(None)
        elif meta is None:
            missing.append(path_name(path))
        else:
            wanted.append((meta, wish_of(keys, leaf)))
    if missing:
        raise CheckpointError(
            f"{reader.manifest.title} has no {', '.join(missing)}; it has "
            + ", ".join(sorted("/".join(k) for k in saved)[:20])
            + (" ..." if len(saved) > 20 else "")
        )
    values = iter(restore_leaves(reader, [w for w in wanted if w is not None]))
    out = []
    for (_, leaf), wish in zip(flat, wanted):
        out.append(next(values) if wish is not None else PLACEHOLDER if leaf is PLACEHOLDER else None)
    return jax.tree_util.tree_unflatten(treedef, out)


__all__ = ["Wish", "as_bytes", "restore_leaves", "restore_tree"]
