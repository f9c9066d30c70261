"""SLAMB: layer-wise adaptive steps with a tenth of the gradient exchange, as an optax transformation.

With the two files it imports it stands alone (jax and optax only) and follows optax's conventions,
`ValueError` included. Equation numbers (1) to (9) are those of `docs/slamb.md`.
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hetjax.optim._slamb_arguments import (
    check_axis_name,
    check_floating,
    check_learning_rate,
    check_static,
    read_stages,
)
from hetjax.optim.mapped_axes import (
    AxisName,
    as_varying,
    check_bound,
    check_varying,
    placed_like,
    varying_like,
)

# A number, or stages ((first_step, value), ...): the value holds from that many completed steps on.
Staged = float | Sequence[tuple[int, float]]


class ScaleBySlambState(NamedTuple):
    """State of `scale_by_slamb`; on N workers mu and nu are N different trees.

    Attributes:
      count: int32 `[]`, steps taken; a skipped step does not count. Equal on all workers.
      mu: first moment, float32, shaped like the parameters. With ``compensation="held"`` the worker's
        own; with ``"local"``, right after a step, equal on all workers at the coordinates sent in it.
      nu: second moment, float32, shaped like the parameters. The worker's own; right after a step, equal
        on all workers at the coordinates of it that were sent (`nu_ratio`).
      skipped: int32 `[]`, steps skipped because a gradient was not finite on some worker.
      sync_due: bool `[]`, whether parameters are to be averaged after the latest step.
      held: None, or what each coordinate's mean over workers was when it was last sent; float32, shaped
        like the parameters, equal on all workers: with ``compensation="held"`` of the first moment,
        with ``exchange="direction"`` and a `comm_dtype` below 32 bits of the direction.
    """

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    skipped: jax.Array
    sync_due: jax.Array
    held: optax.Updates | None


def scale_by_slamb(
    axis_name: AxisName | None = None,
    *,
    compress_ratio: Staged = 0.1,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
    weight_decay: jax.typing.ArrayLike = 0.0,
    weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
    min_ratio: jax.typing.ArrayLike = 0.01,
    max_ratio: jax.typing.ArrayLike = 1000.0,
    min_size: int = 9000,
    sync_every: int | Sequence[tuple[int, int]] = 100,
    seed: int = 44,
    comm_dtype: jax.typing.DTypeLike | None = None,
    finite_vote: bool = True,
    compensation: str = "local",
    nu_ratio: float = 0.0,
    bound_direction: bool = False,
    exchange: str = "momentum",
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales gradients by SLAMB, exchanging a fraction of the first moment.

    Each worker updates both moments with its own gradient. One all-reduce then takes the mean over
    workers of a shared :math:`1/C` of their coordinates, :math:`C = \lfloor 1/k \rfloor`; which ones
    follows from the step count, so no indices travel. See `slamb` for what moves the rest, for the
    arguments, the contract and an example.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`; its updates point uphill,
      as those of every ``scale_by_*``.
    """
    ratios = read_stages("compress_ratio", compress_ratio)
    periods = read_stages("sync_every", sync_every)
    is_held = compensation == "held"
    check_axis_name(axis_name)
    check_static(
        ratios, periods, compensation, exchange, comm_dtype,
        dict(b1=b1, b2=b2, b3=b3, eps=eps, weight_decay=weight_decay, min_ratio=min_ratio,
             max_ratio=max_ratio),
        min_size=min_size, seed=seed, finite_vote=finite_vote, nu_ratio=nu_ratio,
        bound_direction=bound_direction)
    # Only what is news to the others is rounded: see `exchange`.
    sends_news = (exchange == "direction" and axis_name is not None and comm_dtype is not None
                  and jnp.dtype(comm_dtype).itemsize < 4)
    all_chunks = [int(1.0 / ratio + 1e-9) for _, ratio in ratios]  # as published: 0.3 gives 3

    def init_fn(params: optax.Params) -> Any:
        check_floating(params)

        def zeros():
            return jax.tree.map(lambda p: jnp.zeros_like(p, _accumulator(p)), params)

        return ScaleBySlambState(
            count=jnp.zeros([], jnp.int32), mu=zeros(), nu=zeros(),
            skipped=jnp.zeros([], jnp.int32), sync_due=jnp.zeros([], bool),
            held=zeros() if is_held or sends_news else None)

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        del extra_args
        if params is None:
            raise ValueError(
                "slamb needs the parameters: call update(grads, state, params), for trust ratios "
                "and weight decay are functions of them.")
        check_bound(axis_name)
        check_varying(updates, axis_name)
        step = jnp.asarray(optax.safe_increment(state.count))
        paths, treedef = jax.tree_util.tree_flatten_with_path(updates)
        if not paths:  # optax.masked took every leaf away
            return updates, state._replace(count=step, sync_due=_is_due(step, periods))
        grads = [g.astype(_accumulator(g)) for _, g in paths]
        # By path, so that a masked or partitioned tree keeps each leaf's choice of coordinates.
        leaf_seeds = [
            zlib.crc32(f"{seed}{jax.tree_util.keystr(path)}".encode()) for path, _ in paths]
        flat = treedef.flatten_up_to
        decays = flat(_decay_mask(weight_decay_mask, params, updates))
        weights = [w.astype(g.dtype) for w, g in zip(flat(params), grads)]
        old_mu, old_nu = flat(state.mu), flat(state.nu)
        old_held: list[Any] = [None] * len(grads) if state.held is None else flat(state.held)

        bad = jnp.array(False)
        if finite_vote:
            bad = ~_all_finite(grads)
        num_workers = 1 if axis_name is None else jax.lax.axis_size(axis_name)

        def debias(decay, like):
            return 1 - decay ** step.astype(like.dtype)

        def first(m, g):  # (1), local
            return b1 * m + (1 - b1) * g

        def second(v, g):  # (2), local
            return b2 * v + (1 - b2) * g * g

        def root(v):
            return jnp.sqrt(v / debias(b2, v)) + eps

        def apply_stage(stage: int):
            """Returns (updates, mu, nu, held, ok) with the compress ratio of one stage."""
            plans = [
                _LeafPlan(g.shape, all_chunks[: stage + 1] if _is_large(g, min_size) else [1],
                          [first for first, _ in ratios[: stage + 1]], leaf_seed, step)
                for g, leaf_seed in zip(grads, leaf_seeds)]
            nu_plans = [
                _LeafPlan(g.shape, [int(1 / nu_ratio + 1e-9) if _is_large(g, min_size) else 1], [0],
                          leaf_seed, step)
                for g, leaf_seed in zip(grads, leaf_seeds)] if nu_ratio else []
            # (3): the sent part of every leaf and the vote, in one vector and one all-reduce. Moments
            # are made anew there and below: no leaf is kept in between.
            sent = [first(plan.take(m), plan.take(g)) for plan, m, g in zip(plans, old_mu, grads)]
            units = []
            if exchange == "direction" and num_workers > 1:  # (3'): see `slamb`
                units = [root(second(plan.take(v), plan.take(g))) * debias(b1, g)
                         for plan, v, g in zip(plans, old_nu, grads)]
                sent = [m / unit for m, unit in zip(sent, units)]
            known = []
            if units and sends_news:
                # What becomes of the mean last sent where no gradient comes, C steps later.
                known = [plan.take(h) * b1 ** plan.chunks[-1] for plan, h in zip(plans, old_held)]
                sent = [x - expected for x, expected in zip(sent, known)]
            sent_nu = [second(plan.take(v), plan.take(g))
                       for plan, v, g in zip(nu_plans, old_nu, grads)]
            means, any_bad = _mean_over_workers(
                sent + sent_nu, bad if finite_vote else None, axis_name, comm_dtype)
            ok = None
            if any_bad is not None:
                # The means are the same bits on all workers, so an overflow in comm_dtype is seen
                # by all alike, like the vote itself.
                ok = ~any_bad & _all_finite(means)
            agreed = means[: len(plans)]
            if known:
                agreed = [mean + expected for mean, expected in zip(agreed, known)]
            if units:
                means[: len(plans)] = [mean * unit for mean, unit in zip(agreed, units)]

            def kept(new, old):
                return new if ok is None else jnp.where(ok, new, old)

            out = []
            for i, (plan, g) in enumerate(zip(plans, grads)):
                m, v, held = first(old_mu[i], g), second(old_nu[i], g), old_held[i]
                if nu_plans:
                    v = nu_plans[i].receive(v, means[len(plans) + i])
                if is_held:
                    m = kept(m, old_mu[i])
                    held = direction = kept(plan.receive(held, means[i]), held)  # (4')
                else:
                    m = direction = kept(plan.receive(m, means[i]), old_mu[i])  # (4)
                    if known:
                        held = kept(plan.receive(held, agreed[i]), held)
                v = kept(v, old_nu[i])
                unit = (direction / debias(b1, v)) / root(v)  # (5)
                if bound_direction:
                    # From b1^2 = b2 on the series diverges: there is no bound.
                    left = (1 - b2) * (1 - b1 * b1 / jnp.maximum(b2, jnp.finfo(g.dtype).tiny))
                    largest = jnp.where(
                        left > 0, (1 - b1) / jnp.sqrt(jnp.where(left > 0, left, 1)), jnp.inf)
                    unit = jnp.clip(unit, -largest, largest)
                if decays[i]:
                    unit = unit + weight_decay * weights[i]  # inside the norms, as in LAMB
                scaled = _rescale(
                    unit, weights[i], plan, None if is_held else b3, num_workers, min_ratio, max_ratio)
                out.append((kept(scaled, jnp.zeros_like(scaled)).astype(paths[i][1].dtype), m, v, held))
            by_kind = as_varying([list(kind) for kind in zip(*out)], axis_name)
            return *by_kind, jnp.array(True) if ok is None else ok

        if len(ratios) == 1:
            new_updates, mu, nu, held, ok = apply_stage(0)
        else:
            # The stage depends on the count alone, so all workers take the same branch, and only
            # that branch's all-reduce runs.
            later = jnp.array([first for first, _ in ratios[1:]], jnp.int32)
            new_updates, mu, nu, held, ok = jax.lax.switch(
                jnp.sum(state.count >= later),
                [functools.partial(apply_stage, stage) for stage in range(len(ratios))])
        tree = treedef.unflatten
        count = jnp.where(ok, step, state.count)
        if axis_name is None:  # workers that never exchange: each counts for itself, vote or none
            count = varying_like(count, grads)
        return tree(new_updates), ScaleBySlambState(
            count=count, mu=tree(mu), nu=tree(nu),
            skipped=jnp.where(ok, state.skipped, optax.safe_increment(state.skipped)),
            sync_due=ok & _is_due(step, periods),
            held=None if state.held is None else tree(held))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def slamb(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: AxisName | None = None,
    *,
    compress_ratio: Staged = 0.1,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-6,
    weight_decay: jax.typing.ArrayLike = 0.0,
    weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
    min_ratio: jax.typing.ArrayLike = 0.01,
    max_ratio: jax.typing.ArrayLike = 1000.0,
    min_size: int = 9000,
    sync_every: int | Sequence[tuple[int, int]] = 100,
    seed: int = 44,
    comm_dtype: jax.typing.DTypeLike | None = None,
    finite_vote: bool = True,
    compensation: str = "local",
    nu_ratio: float = 0.0,
    bound_direction: bool = False,
    exchange: str = "momentum",
) -> optax.GradientTransformationExtraArgs:
    r"""The SLAMB optimizer: LAMB that sends about a tenth of the bytes.

    With :math:`S_t` the shared set of coordinates sent at step :math:`t`, :math:`N` workers,
    :math:`\overline{x}` the mean over workers and :math:`a` the steps since a coordinate was last
    sent, worker :math:`i` computes, as published (``compensation="local"``),

    .. math::

      \begin{align*}
        m &\leftarrow b_1 m + (1-b_1) g_i, \quad v \leftarrow b_2 v + (1-b_2) g_i^2 \\
        m_{S_t} &\leftarrow \overline{m_{S_t}} \\
        u &= \hat m / (\sqrt{\hat v} + \epsilon) + \lambda w \\
        \phi &= \mathrm{clip}(r \|w_S\|/\|u_S\| + (1-r) \|w_{\bar S}\|/\|u_{\bar S}\|), \quad
          r = b_3^a \\
        w &\leftarrow w - \eta (r + (1-r)/\sqrt{N}) \, \phi \, u
      \end{align*}

    so that what is not sent moves the worker alone. With ``compensation="held"``, which is ours, it
    moves all workers alike, by the mean it had when it was last sent, while each worker's own moment
    accumulates untouched until its turn:

    .. math::

      h_{S_t} \leftarrow \overline{m_{S_t}}, \quad
      u = \hat h / (\sqrt{\hat v} + \epsilon) + \lambda w, \quad
      w \leftarrow w - \eta \, \mathrm{clip}(\|w\|/\|u\|) \, u

    There is then no pull of workers to their own optima where their data disagree (give `nu_ratio` as
    well), for a moment that is late by (C - 1) / 2 steps in the mean and a lower largest learning rate.

    Parameters and moments differ by worker. Every `sync_every` steps the parameters must be averaged,
    which an additive update cannot do exactly: call `slamb_average` after `apply_updates`, or train
    through `hetjax.data_parallel_step`.

    On several workers call it where `axis_name` is bound (``jax.shard_map``, ``jax.vmap``) with each
    worker's own gradient, not averaged. Under ``shard_map`` the gradient of a replicated parameter
    arrives already summed over workers, with a dense all-reduce; this is detected and refused.

    A step on which any worker's gradient (or the exchanged mean, say by overflow of `comm_dtype`) is
    not finite is skipped on all workers: updates are zero, moments and `count` stay, `skipped` grows
    by one. A learning-rate schedule counts calls, skipped steps included.

    Args:
      learning_rate: a number or a schedule, see :func:`optax.scale_by_learning_rate`.
      axis_name: mapped axis (or axes) over which workers exchange; None for one worker.
      compress_ratio: fraction k of large leaves sent each step, in (0, 1]; :math:`1/k` is rounded
        down. Or stages ``((0, 0.5), (200, 0.1))``: from step 200 on, 0.1. Static.
      b1: decay of the first moment.
      b2: decay of the second moment.
      b3: decay of freshness by age, ``"local"`` only; 1 switches both mixes off.
      eps: added to the root of the second moment.
      weight_decay: strength :math:`\lambda` of weight decay.
      weight_decay_mask: tree of bools like the parameters, or a function from parameters to it;
        None decays leaves of two and more dimensions, as the published code does.
      min_ratio: least trust ratio of leaves of two and more dimensions.
      max_ratio: greatest trust ratio of leaves of two and more dimensions.
      min_size: leaves with fewer elements, and all of one dimension or none, are sent whole. Static.
      sync_every: parameters are averaged after steps 1, H+1, 2H+1, …; with 1 after each step, with 0
        never. Or stages, as for `compress_ratio`. Static.
      seed: of the shared choice of coordinates; the same on all workers and in all resumed runs.
        Static.
      comm_dtype: dtype of the exchanged vector; None for that of the moments (float32). Eight bits
        (``jnp.float8_e4m3fn``) go with ``exchange="direction"`` alone; where partial sums are rounded to
        them at every hop, for some tens of workers.
      finite_vote: whether to vote on finite gradients; the vote is one more element of the exchanged
        vector. Without it a NaN on one worker is on all workers within the step. Static.
      compensation: what moves coordinates that are not sent: ``"local"``, the worker's own moment, as
        published, or ``"held"``, the mean last sent. Static.
      nu_ratio: fraction of the second moment of large leaves exchanged each step, on a cycle of its
        own; 0 for never, as published. Static.
      bound_direction: hold the direction within what any one sequence of gradients can give,
        :math:`(1-b_1)/\sqrt{(1-b_2)(1-b_1^2/b_2)}` (Cauchy-Schwarz; 7.3 with the defaults). LAMB never
        reaches it. A mean moment over a local second moment near zero (a token or unit that only other
        workers saw) does, and then fills the norm of its leaf. Published: no. Static.
      exchange: ``"momentum"``, as published, or ``"direction"``: workers exchange
        :math:`d = \hat m / (\sqrt{\hat v} + \epsilon)` instead, and each takes :math:`\overline{d_S}`
        times its own :math:`\sqrt{\hat v} + \epsilon` for :math:`\hat m_S`. Directions have no unit and
        are seldom above 1, so eight bits hold them. With fewer than 32 bits what travels is
        :math:`d_S - b_1^C h_S`, h the mean last sent (one more tree of state): d itself, rounded each
        time, would have fixed points that no gradient holds up. With ``"local"`` only. Static.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: an argument out of range; static arguments given as arrays; from `init`, parameters
        that are not floating; from `update`, missing parameters or gradients already summed.

    Examples:
      >>> import optax
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from hetjax import slamb
      >>> def f(x): return jnp.sum(x ** 2)  # simple quadratic function
      >>> solver = slamb(learning_rate=0.003)
      >>> params = jnp.array([1., 2., 3.])
      >>> print('Objective function: ', f(params))
      Objective function:  14.0
      >>> opt_state = solver.init(params)
      >>> for _ in range(3):
      ...  grad = jax.grad(f)(params)
      ...  updates, opt_state = solver.update(grad, opt_state, params)
      ...  params = optax.apply_updates(params, updates)
      ...  print('Objective function: {:.2E}'.format(f(params)))
      Objective function: 1.39E+01
      Objective function: 1.38E+01
      Objective function: 1.38E+01

    References:
      Xu et al, `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23v.html>`_, 2023

      You et al, `Large Batch Optimization for Deep Learning: Training BERT in 76 minutes
      <https://arxiv.org/abs/1904.00962>`_, 2020
    """
    check_learning_rate(learning_rate)
    return optax.chain(
        scale_by_slamb(
            axis_name, compress_ratio=compress_ratio, b1=b1, b2=b2, b3=b3, eps=eps,
            weight_decay=weight_decay, weight_decay_mask=weight_decay_mask, min_ratio=min_ratio,
            max_ratio=max_ratio, min_size=min_size, sync_every=sync_every, seed=seed,
            comm_dtype=comm_dtype, finite_vote=finite_vote, compensation=compensation,
            nu_ratio=nu_ratio, bound_direction=bound_direction, exchange=exchange),
        optax.scale_by_learning_rate(learning_rate),
    )


def average_params(params: optax.Params, axis_name: AxisName) -> optax.Params:
    """The mean of the parameters over workers, the same bits on each, by one dense all-reduce.

    (9) of the equations. Moments are not averaged. Adding ``mean - p`` to ``p`` instead would be
    off by an ulp in about half of all float32 entries, so this is not an optax update.

    Args:
      params: tree of floating arrays; each worker's own.
      axis_name: the mapped axis (or axes) of the workers.

    Returns:
      The averaged tree, in the dtypes given; the mean is taken in float32 at least.
    """
    leaves, treedef = jax.tree.flatten(params)
    if not leaves:
        return params
    means, _ = _mean_over_workers(
        [leaf.astype(_accumulator(leaf)).ravel() for leaf in leaves], None, axis_name, None)
    means = [x.reshape(leaf.shape).astype(leaf.dtype) for x, leaf in zip(means, leaves)]
    return treedef.unflatten(as_varying(means, axis_name))


def slamb_average(
    params: optax.Params, opt_state: optax.OptState, axis_name: AxisName | None
) -> optax.Params:
    """The parameters, averaged over workers if the step just taken asks for it.

    Args:
      params: the parameters after `optax.apply_updates`.
      opt_state: the state `update` returned with those updates; holds a `ScaleBySlambState`, bare or
        inside chained or wrapped states.
      axis_name: the mapped axis (or axes) of the workers; None for one worker.

    Returns:
      A tree like `params`. With nothing due no collective runs, though the compiled program holds it.

    Raises:
      ValueError: `opt_state` holds no `ScaleBySlambState`.
    """
    due = [state.sync_due for state in slamb_states(opt_state)]
    if not due:
        raise ValueError(
            "slamb_average: the optimizer state holds no ScaleBySlambState; build the optimizer with "
            f"hetjax.slamb or scale_by_slamb (got {type(opt_state).__name__}).")
    if axis_name is None:
        return params
    params = as_varying(params, axis_name)
    return jax.lax.cond(
        jnp.any(jnp.stack(due)), lambda p: average_params(p, axis_name), lambda p: p, params)


def slamb_states(tree: Any) -> list[ScaleBySlambState]:
    """All `ScaleBySlambState` found in a tree, outermost first."""
    def is_state(node):
        return isinstance(node, ScaleBySlambState)

    return [node for node in jax.tree.leaves(tree, is_leaf=is_state) if is_state(node)]


# ---- which coordinates are sent ----------------------------------------------------------------


class _LeafPlan:
    """Which coordinates of one leaf travel at one step; no state, no indices on the wire.

    The flat leaf of n elements is read as `[C, rows]`, rows = ceil(n / C), the tail missing. Row r has
    a fixed random offset o_r and sends coordinate (t + o_r) mod C of its C at step t: each coordinate
    exactly once in any C steps, and each leaf 1/C of itself in each step. (The published code cuts
    one permutation of all parameters into C pieces; this keeps its bounded age and needs no
    permutation in memory.)

    Only what is sent is read through that table. All else is done in the leaf's own shape, with ages
    and received means laid out for it, so that no moment is padded or cut where C does not divide n.
    """

    def __init__(
        self, shape: tuple[int, ...], chunks: list[int], firsts: list[int], leaf_seed: int, step
    ):
        self.shape, self.chunks, self.firsts = shape, chunks, firsts
        self.leaf_seed, self.step = leaf_seed, step
        self.size = math.prod(shape)
        self.rows = -(-self.size // chunks[-1])
        self.is_whole = chunks[-1] == 1

    def _sent_column(self, chunks: int, step) -> jax.Array:
        """`int32[rows]`: which of its coordinates each row sends at a step."""
        rows = -(-self.size // chunks)
        # The finalizer of MurmurHash3 (Appleby, public domain): well mixed, the same everywhere, and
        # computed where it is used, so that no table of d / C numbers sits in the program.
        x = jax.lax.iota(jnp.uint32, rows) * jnp.uint32(0x9E3779B9)
        x = x + jnp.asarray(self.leaf_seed, jnp.uint32)
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        offset = ((x ^ (x >> 16)) % jnp.uint32(chunks)).astype(jnp.int32)
        # Held back from fusion, which would hash anew for each of the C coordinates of a row.
        return jax.lax.optimization_barrier((step + offset) % chunks)

    @functools.cached_property
    def _column(self) -> jax.Array:
        return self._sent_column(self.chunks[-1], self.step)

    @functools.cached_property
    def age(self) -> jax.Array:
        """Integers of the leaf's shape: steps since each coordinate was last sent, 0 if sent now.

        min((t + o - c) mod C, t) with one ratio; over stages of several ratios, t less the last step at
        which the layout of any stage sent the coordinate.
        """
        if len(self.chunks) == 1:
            chunks = self.chunks[0]
            dtype = jnp.int8 if chunks < 128 else jnp.int32
            # Small integers: ages are read by every pass over the leaf.
            age = jnp.minimum(
                self._behind(chunks, self._column.astype(dtype)),
                jnp.minimum(self.step, chunks).astype(dtype))
            return self._laid_out(age)
        last = jnp.zeros((), jnp.int32)
        for i, (chunks, first) in enumerate(zip(self.chunks, self.firsts)):
            now = i == len(self.chunks) - 1
            end = self.step if now else jnp.asarray(self.firsts[i + 1], jnp.int32)
            column = self._column if now else self._sent_column(chunks, end)
            candidate = self._laid_out(end - self._behind(chunks, column))
            last = jnp.where(candidate > first, candidate, last)
        return self.step - last

    def _behind(self, chunks: int, column: jax.Array) -> jax.Array:
        """`[C, rows]`: (column - c) mod C, how long ago the cycle was at each coordinate."""
        behind = column - jax.lax.broadcasted_iota(column.dtype, (chunks, column.size), 0)
        return jnp.where(behind < 0, behind + jnp.asarray(chunks, column.dtype), behind)

    def _laid_out(self, table: jax.Array) -> jax.Array:
        """The leaf of a table `[C, rows]`, its missing tail left out."""
        whole_rows, rest = divmod(self.size, table.shape[1])
        if whole_rows > 64 or self.size < 9000:
            return table.reshape(-1)[: self.size].reshape(self.shape)
        # Row by row, where it pays: a concatenation is copied, while a flattened table is fused into
        # whatever reads it and divides at every element to find its row (three times the whole update).
        rows = [table[i] for i in range(whole_rows)] + ([table[whole_rows, :rest]] if rest else [])
        return jnp.concatenate(rows).reshape(self.shape)

    def take(self, x: jax.Array) -> jax.Array:
        """`[rows]`: the elements of a leaf that are sent; 0 for those in the missing tail."""
        x = placed_like(x, None).reshape(-1)
        if self.is_whole:
            return x
        # A masked sum over the C rows of the table reads the same and takes forty times as long.
        missing = self.rows * self.chunks[-1] - self.size
        table = (jnp.pad(x, (0, missing)) if missing else x).reshape(self.chunks[-1], self.rows)
        return jnp.take_along_axis(table, self._column[None], axis=0)[0]

    def receive(self, x: jax.Array, sent: jax.Array) -> jax.Array:
        """The leaf with `sent` `[rows]` in the places it was taken from."""
        if self.is_whole:
            return placed_like(sent.reshape(self.shape), x)
        spread = self._laid_out(jnp.broadcast_to(sent, (self.chunks[-1], self.rows)))
        return jnp.where(placed_like(self.age, x) == 0, placed_like(spread, x), x)


def _rescale(unit, weight, plan, b3, num_workers, min_ratio, max_ratio):
    """Scales a leaf's direction by its trust ratios and step factor: (6), (7) and (8)."""
    if plan.is_whole or b3 is None:  # sent whole, or held: r = 1 everywhere
        ratio = _trust_ratio(jnp.sum(weight**2), jnp.sum(unit**2))
        # Plain LAMB, without bounds, on what has one dimension.
        return (ratio if unit.ndim <= 1 else jnp.clip(ratio, min_ratio, max_ratio)) * unit
    age = placed_like(plan.age, unit)
    sent_sq = [jnp.sum(plan.take(x) ** 2) for x in (weight, unit)]
    # The rest of the whole; what is less than its rounding is zero.
    whole_sq = [jnp.sum(x**2) for x in (weight, unit)]
    rest_sq = [
        jnp.where(whole - part > 1e-6 * whole, whole - part, 0.0)
        for whole, part in zip(whole_sq, sent_sq)]
    ratio_sent, ratio_unsent = _trust_ratio(*sent_sq), _trust_ratio(*rest_sq)  # (6)
    # b3^age; the exponential is vectorised where a power is not, and 0^0 is 1 here.
    power = jnp.exp(age.astype(unit.dtype) * jnp.log(jnp.asarray(b3, unit.dtype)))
    fresh = jnp.where(age == 0, 1.0, power)
    ratio = jnp.clip(fresh * ratio_sent + (1 - fresh) * ratio_unsent, min_ratio, max_ratio)  # (7)
    # (8): from the step of the global batch to that of one worker's, by the square-root rule.
    return (fresh + (1 - fresh) / num_workers**0.5) * ratio * unit


def _trust_ratio(weight_sq: jax.Array, unit_sq: jax.Array) -> jax.Array:
    """||w|| / ||u||, and 1 when either is zero: a zero-initialised leaf must be able to move."""
    is_zero = (weight_sq == 0) | (unit_sq == 0)
    return jnp.where(is_zero, 1.0, jnp.sqrt(weight_sq) / jnp.sqrt(jnp.where(is_zero, 1.0, unit_sq)))


# ---- the exchange ------------------------------------------------------------------------------


def _mean_over_workers(parts, bad, axis_name, comm_dtype):
    """Means of flat arrays over workers, and whether any worker votes bad, in one all-reduce."""
    sizes = [x.size for x in parts]
    if axis_name is None:
        return parts, bad
    flat = jnp.concatenate([x.ravel() for x in parts])
    workers = jax.lax.axis_size(axis_name)
    alone = workers == 1  # then nothing travels and nothing is rounded
    dtype = jnp.dtype(flat.dtype if comm_dtype is None or alone else comm_dtype)
    # Eight bits end at 448: from 64 workers on, sums of directions are brought down by a power of two.
    divisor = 2 ** max(0, (workers - 1).bit_length() - 5) if dtype.itemsize == 1 else 1
    flat = (flat / divisor if divisor > 1 else flat).astype(dtype)
    if bad is not None:
        # A sum of zeros is exact in any dtype, and a single one among any number of them is not lost.
        flat = jnp.concatenate([flat, bad.astype(dtype)[None]])
    total = jax.lax.psum(flat, axis_name)
    means, start = [], 0
    for x, size in zip(parts, sizes):
        means.append(total[start : start + size].astype(x.dtype) * (divisor / workers))
        start += size
    return means, None if bad is None else ~(total[start] == 0)  # a sum that overflowed is no zero


def _all_finite(arrays: list[jax.Array]) -> jax.Array:
    # A maximum passes NaN on.
    return jnp.all(jnp.stack([jnp.max(jnp.abs(x), initial=0) < jnp.inf for x in arrays]))


# ---- leaves ------------------------------------------------------------------------------------


def _accumulator(x: jax.Array):
    """float32, or float64 for float64: 0.999 rounds to 1 in bfloat16."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _is_large(x: jax.Array, min_size: int) -> bool:
    return x.ndim > 1 and x.size >= max(min_size, 1)


def _decay_mask(mask, params, updates):
    if mask is None:
        return jax.tree.map(lambda p: p.ndim > 1, params)
    mask = mask(params) if callable(mask) else mask
    try:  # a prefix of the tree will do, as for optax.masked
        mask = jax.tree.map(lambda keep, part: jax.tree.map(lambda _: keep, part), mask, updates)
        return jax.tree.map(bool, mask)
    except (ValueError, TypeError, jax.errors.TracerBoolConversionError) as e:
        raise ValueError(
            "slamb: weight_decay_mask must be a tree of Python bools of the structure of the parameters "
            f"or of a prefix of it.\n  mask:       {jax.tree.structure(mask)}\n"
            f"  parameters: {jax.tree.structure(updates)}") from e


def _is_due(step: jax.Array, periods) -> jax.Array:
    """Whether parameters are averaged after step `step` (1, 2, …)."""
    due = jnp.array(False)
    for first, every in periods:
        # t mod 1 is never 1, so a period of one needs its own case.
        now = jnp.array(every == 1) if every < 2 else step % every == 1
        due = jnp.where(step > first, now, due)
    return due
