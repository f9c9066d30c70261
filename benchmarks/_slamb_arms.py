"""The optimizers `slamb.py` compares, each as one worker's step with its own exchange.

Only SLAMB and LAMB are hetjax's or optax's; the others are written here, for comparison, from their
papers: top-k with error feedback, 1-bit LAMB, DiLoCo, PowerSGD.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax import average_params, scale_by_slamb
from hetjax.optim._slamb import _LeafPlan

AXIS = "data"
PHASE_DENSE, PHASE_SPARSE = "dense", "sparse"


@dataclass(frozen=True)
class Arm:
    """One optimizer on N workers.

    Attributes:
      name: as printed.
      init: parameters to state, for one worker.
      step: `(params, state, grads, learning_rate, phase) -> (params, state)` where `AXIS` is bound;
        `phase` indexes `phases` and is a Python int, so that each phase is a program of its own.
      phases: names of the kinds of step.
      phase_of: 1-based step (traced) to the index of its phase.
      share: `share(phase, steps)` is the fraction of a run of so many steps spent in a phase.
      learning_rates: the grid it is tuned on.
    """

    name: str
    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]
    phases: tuple[str, ...] = ("step",)
    phase_of: Callable[[Any], Any] = lambda t: jnp.int32(0)
    share: Callable[[int, int], float] = lambda phase, steps: 1.0
    learning_rates: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08)


def decay_matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _move(params, direction, learning_rate):
    return jax.tree.map(lambda p, u: p - learning_rate * u.astype(p.dtype), params, direction)


def _mean(tree):
    """The dense exchange: one all-reduce of the whole tree."""
    return average_params(tree, AXIS)


def _scale_by_lamb(decay, b1=0.9, b2=0.999):
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=1e-6),
        optax.add_decayed_weights(decay, mask=decay_matrices), optax.scale_by_trust_ratio())


def dense(name: str, tx: optax.GradientTransformation, **kw) -> Arm:
    """Any optax direction after a dense gradient exchange."""
    def step(params, state, grads, learning_rate, phase):
        direction, state = tx.update(_mean(grads), state, params)
        return _move(params, direction, learning_rate), state

    return Arm(name, tx.init, step, **kw)


def lamb(decay=0.01, name="LAMB", b1=0.9, **kw) -> Arm:
    return dense(name, _scale_by_lamb(decay, b1), **kw)


def sgd(**kw) -> Arm:
    return dense("SGD-M", optax.trace(0.9), learning_rates=(0.025, 0.05, 0.1, 0.2, 0.4), **kw)


def adam(decay=0.01, **kw) -> Arm:
    tx = optax.chain(
        optax.scale_by_adam(eps=1e-6), optax.add_decayed_weights(decay, mask=decay_matrices))
    return dense("AdamW", tx, learning_rates=(0.0005, 0.001, 0.002, 0.004, 0.008), **kw)


def slamb(name="SLAMB", *, every=100, early=(), decay=0.01, learning_rates=None, **kw) -> Arm:
    """SLAMB; `early` holds stages ((first_step, every), …) of averaging that precede `every`."""
    tx = scale_by_slamb(AXIS, weight_decay=decay, sync_every=0, **kw)

    def step(params, state, grads, learning_rate, phase):
        direction, state = tx.update(grads, state, params)
        params = _move(params, direction, learning_rate)
        return (average_params(params, AXIS) if phase == 1 else params), state

    def phase_of(t):
        if not every:
            return jnp.int32(0)
        period = jnp.int32(every)
        for before, value in reversed(early):
            period = jnp.where(t <= before, value, period)
        return jnp.where(period == 1, True, t % period == 1).astype(jnp.int32)

    def share(phase, steps):
        due = sum(bool(phase_of(jnp.int32(t))) for t in range(1, steps + 1)) / steps
        return due if phase else 1 - due

    arm = Arm(name, tx.init, step, ("local", "average"), phase_of, share)
    return arm if learning_rates is None else Arm(
        name, tx.init, step, ("local", "average"), phase_of, share, learning_rates)


def _flatten(tree):
    leaves, treedef = jax.tree.flatten(tree)
    sizes = [leaf.size for leaf in leaves]

    def restore(flat):
        parts, start = [], 0
        for leaf, size in zip(leaves, sizes):
            parts.append(flat[start : start + size].reshape(leaf.shape))
            start += size
        return treedef.unflatten(parts)

    return jnp.concatenate([leaf.ravel() for leaf in leaves]), restore


def top_k(fraction: float, feedback: bool, decay=0.01) -> Arm:
    """The largest of each worker's gradient (plus what was left over), by all-gather; then LAMB."""
    tx = _scale_by_lamb(decay)

    def init(params):
        flat, _ = _flatten(params)
        return tx.init(params), jnp.zeros_like(flat)

    def step(params, state, grads, learning_rate, phase):
        state, left = state
        flat, restore = _flatten(grads)
        wanted = flat + left if feedback else flat
        _, index = jax.lax.top_k(jnp.abs(wanted), max(1, round(fraction * flat.size)))
        values = wanted[index]
        indices, all_values = jax.lax.all_gather(index, AXIS), jax.lax.all_gather(values, AXIS)
        total = jnp.zeros_like(flat).at[indices.ravel()].add(all_values.ravel())
        left = wanted.at[index].set(0.0)
        direction, state = tx.update(restore(total / jax.lax.axis_size(AXIS)), state, params)
        return _move(params, direction, learning_rate), (state, left)

    return Arm("top-k + feedback" if feedback else "top-k", init, step)


def unsent_dropped(ratio=0.1, decay=0.01, min_size=9000, **kw) -> Arm:
    """SLAMB's mask without compensation: what is not sent neither moves the worker nor is kept."""
    tx = scale_by_slamb(AXIS, weight_decay=decay, sync_every=0, compress_ratio=ratio,
                        min_size=min_size)

    def step(params, state, grads, learning_rate, phase):
        direction, new_state = tx.update(grads, state, params)
        paths, treedef = jax.tree_util.tree_flatten_with_path(grads)
        def sent(path, g):
            if g.ndim <= 1 or g.size < min_size:
                return jnp.ones(g.shape, bool)
            seed = zlib.crc32(f"44{jax.tree_util.keystr(path)}".encode())
            return _LeafPlan(g.shape, [int(1 / ratio + 1e-9)], [0], seed, new_state.count).age == 0

        masks = treedef.unflatten([sent(path, g) for path, g in paths])

        def drop(tree):
            return jax.tree.map(lambda a, m: jnp.where(m, a, 0.0), tree, masks)

        return _move(params, drop(direction), learning_rate), new_state._replace(
            mu=drop(new_state.mu))

    return Arm("SLAMB, unsent dropped", tx.init, step, **kw)


def _pack(positive):
    bits = positive.reshape(-1, 8).astype(jnp.uint8)
    return jnp.sum(bits << jnp.arange(8, dtype=jnp.uint8), axis=1, dtype=jnp.uint8)


def _signs(packed):
    bits = (packed[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return (2.0 * bits - 1.0).reshape(*packed.shape[:-1], -1).astype(jnp.float32)


def one_bit_lamb(warm_up: float, steps: int, decay=0.01, b1=0.9, b2=0.999) -> Arm:
    """1-bit LAMB-like: dense LAMB for a share of the run, then a frozen second moment, frozen trust
    ratios (their running mean) and a first moment exchanged by signs, with errors fed back at worker
    and server (two hops of d / 8 bytes)."""
    freeze = max(2, round(warm_up * steps))
    adam_tx = optax.scale_by_adam(b1=b1, b2=b2, eps=1e-6)

    def init(params):
        flat, _ = _flatten(params)
        pad = -flat.size % 64
        ratios = jax.tree.map(lambda p: jnp.ones([]), params)
        return (adam_tx.init(params), ratios, jnp.zeros(flat.size + pad),
                jnp.zeros((flat.size + pad) // 8))

    def step(params, state, grads, learning_rate, phase):
        adam_state, ratios, worker_error, server_error = state
        if phase == 0:
            unit, adam_state = adam_tx.update(_mean(grads), adam_state)
            unit = jax.tree.map(
                lambda u, p: u + decay * p if p.ndim > 1 else u, unit, params)

            def norm(a):
                return jnp.sqrt(jnp.sum(a * a))

            now = jax.tree.map(
                lambda p, u: jnp.where((norm(p) > 0) & (norm(u) > 0),
                                       norm(p) / jnp.maximum(norm(u), 1e-12), 1.0), params, unit)
            ratios = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, ratios, now)
            direction = jax.tree.map(lambda r, u: r * u, now, unit)
        else:
            mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, adam_state.mu, grads)
            # Signs share one scale, so coordinates are brought to one size by the frozen root.
            root = jax.tree.map(lambda v: jnp.sqrt(v / (1 - b2**freeze)) + 1e-6, adam_state.nu)
            flat, restore = _flatten(jax.tree.map(jnp.divide, mu, root))
            size = flat.size
            wanted = jnp.pad(flat, (0, worker_error.size - size)) + worker_error
            real = jnp.arange(wanted.size) < size
            scale = jnp.sum(jnp.where(real, jnp.abs(wanted), 0)) / size
            worker_error = jnp.where(real, wanted - scale * jnp.where(wanted > 0, 1.0, -1.0), 0.0)
            workers = jax.lax.axis_size(AXIS)
            packed = _pack(wanted > 0).reshape(workers, -1)
            received = jax.lax.all_to_all(packed, AXIS, 0, 0, tiled=True)
            scales = jax.lax.all_gather(scale, AXIS)
            mean = jnp.mean(_signs(received) * scales[:, None], axis=0) + server_error
            server_scale = jnp.mean(jnp.abs(mean))
            server_error = mean - server_scale * jnp.where(mean > 0, 1.0, -1.0)
            everywhere = jax.lax.all_gather(_pack(mean > 0), AXIS)
            server_scales = jax.lax.all_gather(server_scale, AXIS)
            unit = restore((_signs(everywhere) * server_scales[:, None]).ravel()[:size])
            adam_state = adam_state._replace(
                count=adam_state.count + 1, mu=jax.tree.map(jnp.multiply, unit, root))
            unit = jax.tree.map(
                lambda u, p: u + decay * p if p.ndim > 1 else u, unit, params)
            direction = jax.tree.map(lambda r, u: r * u, ratios, unit)
        return (_move(params, direction, learning_rate),
                (adam_state, ratios, worker_error, server_error))

    dense_share = freeze / steps
    return Arm(
        f"1-bit LAMB, {100 * dense_share:.0f} % dense", init, step, (PHASE_DENSE, PHASE_SPARSE),
        lambda t: (t > freeze).astype(jnp.int32),
        lambda phase, _: dense_share if phase == 0 else 1 - dense_share)


def diloco(every: int, decay=0.01, outer_rate=0.7, outer_momentum=0.9) -> Arm:
    """Local AdamW; every so many steps an outer Nesterov step on the mean movement of parameters."""
    inner = optax.chain(
        optax.scale_by_adam(eps=1e-6), optax.add_decayed_weights(decay, mask=decay_matrices))

    def init(params):
        return inner.init(params), params, jax.tree.map(jnp.zeros_like, params)

    def step(params, state, grads, learning_rate, phase):
        inner_state, anchor, velocity = state
        direction, inner_state = inner.update(grads, inner_state, params)
        params = _move(params, direction, learning_rate)
        if phase == 1:
            moved = jax.tree.map(jnp.subtract, anchor, average_params(params, AXIS))
            velocity = jax.tree.map(lambda v, d: outer_momentum * v + d, velocity, moved)
            anchor = jax.tree.map(
                lambda a, v, d: a - outer_rate * (outer_momentum * v + d), anchor, velocity, moved)
            params = anchor
        return params, (inner_state, anchor, velocity)

    return Arm(f"DiLoCo, H = {every}", init, step, ("local", "outer"),
               lambda t: (t % every == 0).astype(jnp.int32),
               lambda phase, _: 1 / every if phase else 1 - 1 / every,
               learning_rates=(0.0005, 0.001, 0.002, 0.004, 0.008))


def power_sgd(fraction: float, decay=0.01) -> Arm:
    """PowerSGD with error feedback, each matrix at the rank that costs `fraction` of it; then LAMB."""
    tx = _scale_by_lamb(decay)

    def rank_of(p):
        return max(1, round(fraction * p.size / (p.shape[0] + p.size // p.shape[0])))

    def is_large(p):
        return p.ndim > 1 and rank_of(p) < min(p.shape[0], p.size // p.shape[0])

    def init(params):
        q = [jax.random.normal(jax.random.key(i), (p.size // p.shape[0], rank_of(p)))
             if is_large(p) else jnp.zeros([]) for i, p in enumerate(jax.tree.leaves(params))]
        return tx.init(params), jax.tree.map(jnp.zeros_like, params), q

    def step(params, state, grads, learning_rate, phase):
        tx_state, error, q = state
        leaves, treedef = jax.tree.flatten(grads)
        left = treedef.flatten_up_to(error)
        wanted = [g + e if is_large(g) else g for g, e in zip(leaves, left)]
        matrix = [w.reshape(w.shape[0], -1) if is_large(w) else w for w in wanted]
        first = _mean([m @ qi if is_large(w) else w for m, qi, w in zip(matrix, q, wanted)])
        basis = [jnp.linalg.qr(p)[0] if is_large(w) else p for p, w in zip(first, wanted)]
        new_q = _mean([m.T @ b for m, b, w in zip(matrix, basis, wanted) if is_large(w)])
        got, out_q, out_error, large = [], [], [], iter(new_q)
        for w, b, qi in zip(wanted, basis, q):
            if is_large(w):
                qi = next(large)
                approx = (b @ qi.T).reshape(w.shape)
                got.append(approx)
                out_error.append(w - approx)
            else:
                got.append(b)
                out_error.append(jnp.zeros_like(w))
            out_q.append(qi)
        direction, tx_state = tx.update(treedef.unflatten(got), tx_state, params)
        return (_move(params, direction, learning_rate),
                (tx_state, treedef.unflatten(out_error), out_q))

    return Arm("PowerSGD", init, step)
