"""The axis name of a step written for pmap, bound without pmap: R replicas inside one program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ir import _jax
from hetjax.ir.errors import PlanError


def bind_axis(
    fn: Callable[..., Any], name: str, replicas: int = 1, batch_argnums: Sequence[int] | None = None
) -> Callable[..., Any]:
    """Returns the step with an axis bound, to be called on whole batches and one copy of the state.

    It means what `jax.pmap(fn, axis_name=name)` means over as many devices, each with its part of the
    batch in order: `pmean` is a mean over the replicas' values, so that a mean of a masked mean stays
    one; `axis_index` numbers the replicas. Results that every replica agrees on (state, metrics after
    pmean or psum) come back once; others get the leading axis that pmap would give them.

    Args:
      fn: a step that returns its new state.
      name: the axis.
      replicas: how many devices the step ran on; 1 makes every collective the identity.
      batch_argnums: which arguments carry the batch; None takes all after the first.

    Raises (when run):
      PlanError: the batch does not divide over the replicas, or the replicas' states differ.
    """
    if replicas < 1:
        raise PlanError(f"replicas is {replicas}; it must be at least 1")

    @functools.wraps(fn)
    def bound(*args: Any) -> Any:
        import jax

        chosen = batch_argnums if batch_argnums is not None else range(1, len(args))
        size = _batch_size([args[k] for k in chosen])
        if size is None or size % replicas:
            raise PlanError(
                f"axis {name!r} is bound over {replicas} replicas, which do not divide a batch of {size} examples"
            )

        def part(leaf: Any) -> Any:
            if _rows(leaf) != size:
                return leaf
            return jax.numpy.reshape(leaf, (replicas, size // replicas, *leaf.shape[1:]))

        split = [jax.tree.map(part, a) if k in chosen else a for k, a in enumerate(args)]
        axes = [jax.tree.map(lambda x: 0 if _rows(x) == size else None, a) if k in chosen else None for k, a in enumerate(args)]
        differs: list[Any] = []

        def recorded(*inner: Any) -> Any:
            out = fn(*inner)
            differs[:] = [jax.tree.map(_jax.is_batched, out)]
            return out

        over = functools.partial(jax.vmap, in_axes=tuple(axes), axis_name=name, axis_size=replicas)
        jax.eval_shape(over(recorded, out_axes=0), *split)
        _check_state(differs[0], jax.tree.structure(args[0]), name)
        out_axes = jax.tree.map(lambda mapped: 0 if mapped else None, differs[0])
        return over(fn, out_axes=out_axes)(*split)

    return bound


def describe(name: str, replicas: int) -> str:
    """Returns what was bound, in words."""
    if replicas == 1:
        return f"'{name}' is bound to one replica, which has the whole batch: pmean and psum over it change nothing"
    return (
        f"'{name}' is bound to {replicas} replicas, each with 1/{replicas} of the batch in order, as under pmap on "
        f"{replicas} devices"
    )


def unbound(error: Exception) -> PlanError | None:
    """Returns what to tell of a step whose axis nobody has bound; None for any other error."""
    text = str(error)
    if not isinstance(error, NameError) or "unbound axis name" not in text:
        return None
    name = text.split("unbound axis name:")[-1].split()[0].strip("'\".,")
    return PlanError(
        f"the step uses the axis name {name!r}, as under pmap, and nothing binds it; say axis_name={name!r}, with "
        "replicas=R for the meaning it had on R devices (hetjax check --axis-name)"
    )


def _rows(leaf: Any) -> int | None:
    return leaf.shape[0] if getattr(leaf, "ndim", 0) and not _jax.is_key(leaf) else None


def _batch_size(arguments: Sequence[Any]) -> int | None:
    """Returns the commonest size of axis 0."""
    import jax

    sizes = [n for n in map(_rows, jax.tree.leaves(list(arguments))) if n is not None]
    return max(set(sizes), key=lambda n: (sizes.count(n), n), default=None)


def _check_state(differs: Any, state: Any, name: str) -> None:
    """Raises where the part of a result that is the new state is not the same in all replicas."""
    import jax

    parts = differs if isinstance(differs, (tuple, list)) else [differs]
    for part in [differs, *parts]:
        if jax.tree.structure(part) == state:
            wrong = [jax.tree_util.keystr(p, simple=True, separator="/") for p, d in jax.tree_util.tree_leaves_with_path(part) if d]
            if wrong:
                more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
                raise PlanError(
                    f"the new state differs between the replicas of axis {name!r} ({', '.join(wrong[:4])}{more}); under "
                    "pmap they would drift apart: take lax.pmean of the gradients before the update"
                )
            return
