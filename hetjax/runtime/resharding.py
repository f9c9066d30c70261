"""Carries a value from one mesh to another as the pieces of its reshard say, inside one process.

`make_move` returns a callable that takes the value on the source mesh and returns it on the target
mesh. Nothing waits: slices, copies and completion are dispatched like any other computation. Where the
pieces leave each target device a share of a finer sharding, the target mesh completes it with a
collective; elsewhere devices pass blocks on as the pieces say.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetjax.ir.blocks import common, covers, elements
from hetjax.ir.errors import RuntimeFault
from hetjax.ir.graph import Aval
from hetjax.ir.program import Block, Piece, Reshard, Spec, StageMesh
from hetjax.runtime.meshes import named_sharding


def make_move(
    reshard: Reshard, aval: Aval, source: StageMesh, target: StageMesh, target_mesh: Any,
    devices: Mapping[int, Any],
) -> PieceMove | None:
    """Returns what carries a reshard's value by its pieces, or None where `jax.device_put` does the same.

    Args:
      reshard: with its pieces.
      aval: type of the value it carries each time.
      source, target: the meshes it goes between.
      target_mesh: the target as a jax mesh.
      devices: the jax device at each position of the cluster that the meshes name.
    """
    # Joining 2-bit integers aborts XLA's CPU compiler or corrupts its heap (jaxlib 0.10).
    if aval.dtype in ("i2", "u2") or not reshard.pieces or (len(source.devices) == 1 and len(target.devices) == 1):
        return None
    return PieceMove(reshard, aval.shape, source, target, target_mesh, devices)


class PieceMove:
    """A reshard ready to run; see `make_move`.

    Attributes:
      bytes_sent: bytes that left one device for another, by (source, target) position, counted where
        arrays are handed over.
      bytes_between: bytes that one call sends from a device of the source to one of the target.
      completes: "all-gather" where the target mesh completes the value with a collective, else "".
    """

    def __init__(
        self, reshard: Reshard, shape: tuple[int, ...], source: StageMesh, target: StageMesh,
        target_mesh: Any, devices: Mapping[int, Any],
    ):
        self.name, self.shape, nbytes = reshard.name, shape, reshard.nbytes
        self._devices = devices
        self._number = {devices[d]: d for d in source.devices}
        self._own = source.blocks(reshard.source_spec, shape)
        self._due = target.blocks(reshard.target_spec, shape)
        self._order = target.devices
        self.sharding = named_sharding(target_mesh, reshard.target_spec)
        self.bytes_sent: collections.Counter[tuple[int, int]] = collections.Counter()
        size = nbytes / max(1, math.prod(shape))
        self.bytes_between = sum(
            round(size * elements((p.start, p.stop))) for p in reshard.pieces
            if p.source in self._own and p.target in self._due and p.source != p.target)
        self._counting = threading.Lock()
        hops = _hops(reshard.pieces, self._own)
        self._entry = self._finer = None
        if len(hops) > 1 and all(p.target in self._due for p in hops[0]):
            self._finer = _finer_spec(hops[0], reshard.target_spec, target, shape)
        self.completes = "" if self._finer is None else "all-gather"
        if self._finer is not None:
            hops = hops[:1]
            self._entry = named_sharding(target_mesh, self._finer)
            self._due = target.blocks(self._finer, shape)
        self._hops = [sorted(pieces, key=lambda p: p.source) for pieces in hops]

    def __call__(self, array: Any) -> Any:
        """Returns the value on the target mesh, with the reshard's target spec."""
        return self.complete(self.bring(array))

    def complete(self, array: Any) -> Any:
        """Returns what `bring` brought with the reshard's target spec, by the mesh's own collective."""
        return _gather(self.sharding)(array) if self.completes else array

    def bring(self, array: Any) -> Any:
        """Returns the value on the target mesh, split more finely where the mesh has yet to complete it.

        Raises:
          RuntimeFault: the value has another shape or lies elsewhere than the reshard says.
        """
        import jax

        held = self._held(array)
        for pieces in self._hops:
            blocks: list[tuple[Piece, Any]] = []
            for device, group in itertools.groupby(pieces, key=lambda p: p.source):
                leaving = list(group)
                distinct = list(dict.fromkeys((p.start, p.stop) for p in leaving))
                cut = dict(zip(distinct, assemble(held[device], distinct)))
                blocks.extend((p, cut[p.start, p.stop]) for p in leaving)
            away = [(p, x) for p, x in blocks if p.source != p.target]
            moved = jax.device_put([x for _, x in away], [self._devices[p.target] for p, _ in away])
            with self._counting:
                for p, x in away:
                    self.bytes_sent[p.source, p.target] += x.nbytes
            stay = [(p, x) for p, x in blocks if p.source == p.target]
            for p, x in [*zip((p for p, _ in away), moved), *stay]:
                held.setdefault(p.target, []).append(((p.start, p.stop), x))
        parts = [assemble(held[d], [self._due[d]])[0] for d in self._order]
        sharding = self.sharding if self._entry is None else self._entry
        return jax.make_array_from_single_device_arrays(self.shape, sharding, parts)

    def _held(self, array: Any) -> dict[int, list[tuple[Block, Any]]]:
        """Returns the blocks of a value by the number of the device that has them."""
        held: dict[int, list[tuple[Block, Any]]] = {}
        for shard in array.addressable_shards:
            device = self._number.get(shard.device, -1)
            block = self._own.get(device)
            if block is None or shard.data.shape != tuple(b - a for a, b in zip(*block)):
                raise RuntimeFault(
                    f"{self.name}: device {shard.device} holds {shard.data.shape} of a value {array.shape}; the plan "
                    f"has {'nothing' if block is None else f'the block {block[0]} to {block[1]}'} of {self.shape} there"
                )
            held.setdefault(device, [(block, shard.data)])
        if len(held) < len(self._number):
            raise RuntimeFault(f"{self.name}: the value lies on {len(held)} devices; the plan has it on {len(self._number)}")
        return held


@functools.lru_cache(maxsize=1024)
def _gather(sharding: Any) -> Callable[[Any], Any]:
    """Returns the collective that brings a value on a mesh to another sharding of that mesh."""
    import jax

    return jax.jit(lambda x: x, out_shardings=sharding)


def _hops(pieces: Sequence[Piece], own: dict[int, Block]) -> list[list[Piece]]:
    """Returns the pieces by how many others they wait for."""
    depth: dict[int, list[tuple[Block, int]]] = {}
    out: list[list[Piece]] = []
    for p in pieces:
        block = (p.start, p.stop)
        hop = 0
        if not (p.source in own and covers(own[p.source], block)):
            hop = 1 + max(h for b, h in depth[p.source] if common(b, block) is not None)
        depth.setdefault(p.target, []).append((block, hop))
        while len(out) <= hop:
            out.append([])
        out[hop].append(p)
    return out


def _finer_spec(entry: Sequence[Piece], spec: Spec, target: StageMesh, shape: tuple[int, ...]) -> Spec | None:
    """Returns the sharding of the target mesh that the first pieces leave, None where they leave none."""
    used = {a for axes in spec for a in axes}
    free = tuple(a for a, n in target.axes if a not in used and n > 1)
    brought: dict[int, int] = {}
    for p in entry:
        brought[p.target] = brought.get(p.target, 0) + elements((p.start, p.stop))
    full = spec or ((),) * len(shape)
    for d, n in enumerate(shape):
        finer = tuple((*axes, *free) if k == d else axes for k, axes in enumerate(full))
        if not free or n % target.parts(finer)[d]:
            continue
        blocks = target.blocks(finer, shape)
        if all(brought.get(x) == elements(blocks[x]) for x in target.devices) and all(
            covers(blocks[p.target], (p.start, p.stop)) for p in entry
        ):
            return finer
    return None


def assemble(held: Sequence[tuple[Block, Any]], wanted: Sequence[Block]) -> list[Any]:
    """Returns blocks as arrays on one device, cut and joined from arrays it holds.

    Args:
      held: blocks with their arrays, all on one device; the latest comes first where several fit.
      wanted: blocks that those held cover.
    """
    out: list[Any] = []
    for block in wanted:
        whole = next((x for b, x in reversed(held) if b == block), None)
        if whole is None:
            outer = next(((b, x) for b, x in reversed(held) if covers(b, block)), None)
            if outer is not None:
                whole = _cut(*_relative(block, outer[0]))(outer[1])
            else:
                parts = [(m, b, x) for b, x in held for m in (common(b, block),) if m is not None]
                recipe = tuple((_relative(m, b), _relative(m, block)) for m, b, _ in parts)
                size = tuple(b - a for a, b in zip(*block))
                whole = _join(recipe, size)(*(x for _, _, x in parts))
        out.append(whole)
    return out


def _relative(block: Block, outer: Block) -> Block:
    """Returns a block's bounds inside another that contains it."""
    return tuple(a - o for a, o in zip(block[0], outer[0])), tuple(b - o for b, o in zip(block[1], outer[0]))


@functools.lru_cache(maxsize=4096)
def _cut(start: tuple[int, ...], stop: tuple[int, ...]) -> Callable[[Any], Any]:
    import jax

    return jax.jit(lambda x: jax.lax.slice(x, start, stop))


@functools.lru_cache(maxsize=4096)
def _join(recipe: tuple[tuple[Block, Block], ...], size: tuple[int, ...]) -> Callable[..., Any]:
    """Returns what writes parts of arrays to their places in one array."""
    import jax
    import jax.numpy as jnp

    along = _tiled(tuple(place for _, place in recipe), size)

    def join(*arrays: Any) -> Any:
        parts = [jax.lax.slice(x, *cut) for x, (cut, _) in zip(arrays, recipe)]
        if along is not None:
            return jnp.concatenate([parts[k] for k in along[1]], axis=along[0])
        out = jnp.zeros(size, parts[0].dtype)
        for part, (_, (at, _)) in zip(parts, recipe):
            out = jax.lax.dynamic_update_slice(out, part, at)
        return out

    return jax.jit(join)


def _tiled(places: tuple[Block, ...], size: tuple[int, ...]) -> tuple[int, list[int]] | None:
    """Returns along which dimension blocks lie side by side, and their order; None where they do not."""
    for d, n in enumerate(size):
        if all(a[k] == 0 and b[k] == size[k] for a, b in places for k in range(len(size)) if k != d):
            order = sorted(range(len(places)), key=lambda i: places[i][0][d])
            edges = [places[i][0][d] for i in order] + [n]
            if edges[0] == 0 and all(places[i][1][d] == e for i, e in zip(order, edges[1:])):
                return d, order
    return None
