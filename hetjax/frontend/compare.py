"""The one tolerance: when two results of the same step are equal, leaf by leaf.

Per leaf, max|difference| <= rtol * max|leaf| + atol * max|tree|. The tree is the group the leaf
belongs to: the parameters, the first moments, the second moments; an output by its first key. A
relative rule alone is impossible: attention's key bias has no gradient and holds only noise. In f32
rtol is 1e-6 and atol 1e-7; what an optimizer keeps of the gradient has rtol 1e-5.

Integers, booleans and PRNG keys are exact; so are tree, shape, dtype and weak type. Beyond that,
two things no rounding-free rule can ask for:

*Normalising optimizers.* Adam divides the gradient by its own size, so an element whose gradient
is rounding noise moves by a full learning rate in a direction that is noise. Moments are judged by
the rule above. A parameter element with second moment v_i may in addition differ by

    U * min(2, 2 r_i),   r_i = (rtol_m * max sqrt(v) + atol_m * max_tree sqrt(v)) / sqrt(v_i)

where U is the largest parameter update of the step: r_i is how large the moments' own tolerance is
beside that element's gradient. An element with an ordinary gradient gains about 1e-5 of its update;
only elements at noise level are let go, and those are judged through their moments. Where there is a
first moment alone (Lion takes its sign), its size stands for sqrt(v).

*Low precision.* A step that computes in bf16 or fp16 has their rtol in what it computed this step:
an output, a moment, the change of a parameter; not in what the parameter already was, or an update
smaller than 1e-3 of its parameter would never be seen. A leaf stored in a low-precision dtype may
differ by one unit in its last place, since there is no number between.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """A relative and an absolute bound; see the module's text."""

    rtol: float
    atol: float


F32 = Tolerance(1e-6, 1e-7)
MOMENTS = Tolerance(1e-5, 1e-7)
# By mantissa bits, fewest first: fp8 and narrower, bf16, fp16, f32, f64. The bounds of f32, bf16 and fp16
# were decided; fp8 and f64 follow them.
_BY_MANTISSA = ((3, Tolerance(1e-2, 1e-3)), (7, Tolerance(1e-3, 1e-4)), (10, Tolerance(1e-4, 1e-5)),
                (23, F32), (112, Tolerance(1e-12, 1e-13)))

# Names optax gives to what it keeps of the gradient. What is kept of a gradient has the gradient's noise, so
# momentum (`trace`) is judged as Adam's first moment is; it does not normalise.
_FIRST_MOMENTS = ("mu",)
_SECOND_MOMENTS = ("nu", "sum_of_squares", "v")
_MOMENTS = (*_FIRST_MOMENTS, *_SECOND_MOMENTS, "trace", "v_row", "v_col")


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a result.

    Attributes:
      value: the array on the host; a PRNG key as its key data.
      weak_type: JAX's weak type flag.
      dtype: its dtype's name; "key<fry>" for keys.
    """

    value: np.ndarray
    weak_type: bool
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """How one leaf of two results compares.

    Attributes:
      path: "state/params/block_0/attn/kernel".
      group: the tree it belongs to: "state/params".
      rule: "exact", "leaf", "moment", "normalised" (a parameter under a normalising optimizer) or
        "structure" (the leaf is missing, or its shape, dtype or weak type differs).
      max_abs: the largest difference; inf where one side is not finite and the other is not the same.
      size: max|leaf| of the reference.
      allowed: what the rule allows at the element that comes closest to its bound, or past it.
      max_rel: rtol times the largest ratio of difference to what is allowed: at most rtol when equal.
      rtol: the relative bound used.
      note: in words, where numbers do not tell.
    """

    path: str
    group: str
    rule: str
    max_abs: float
    size: float
    allowed: float
    max_rel: float
    rtol: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.max_rel <= self.rtol

    @property
    def excess(self) -> float:
        """How many times over its bound; the order of "worst"."""
        return self.max_rel / self.rtol if self.rtol else (np.inf if self.max_rel else 0.0)


def host_leaves(tree: Any) -> dict[Path, Leaf]:
    """Returns the leaves of a pytree on the host, by path.

    A trailing `.value` of an nnx variable or a linen box is not part of the path.

    Args:
      tree: a pytree of arrays and scalars, wherever they live.
    """
    import jax

    out = {}
    for keys, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = tuple(jax.tree_util.keystr((k,), simple=True) for k in keys)
        if len(path) > 1 and path[-1] == "value" and isinstance(keys[-1], jax.tree_util.GetAttrKey):
            path = path[:-1]
        aval = jax.typeof(value)
        dtype = aval.dtype
        if dtype == jax.dtypes.float0:
            continue
        if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        out[path] = Leaf(np.asarray(value), bool(getattr(aval, "weak_type", False)), str(dtype))
    return out


def lowest_precision(dtypes: Iterable[Any]) -> Tolerance | None:
    """Returns the tolerance of the least precise float dtype among some, or None for f32 and wider."""
    found = [_tolerance(d) for d in dtypes if _is_float(d)]
    low = max(found, key=lambda t: t.rtol, default=F32)
    return low if low.rtol > F32.rtol else None


def compare_step(
    before: Mapping[Path, Leaf],
    reference: tuple[Mapping[Path, Leaf], Mapping[Path, Leaf]],
    result: tuple[Mapping[Path, Leaf], Mapping[Path, Leaf]],
    *,
    tolerance: Tolerance | None = None,
    computed_in: Tolerance | None = None,
) -> tuple[Difference, ...]:
    """Returns one `Difference` per leaf of state and outputs, for two runs of a step from one state.

    Args:
      before: the state both started from.
      reference: (new state, outputs) of plain jit.
      result: (new state, outputs) to judge.
      tolerance: bounds for every float leaf, in place of the defaults by dtype and kind.
      computed_in: `lowest_precision` of the dtypes the step computes in.
    """
    new_state, outputs = reference
    groups = _state_groups(new_state)
    sizes = _Sizes(new_state, outputs, before, groups)
    gradients = _gradient_sizes(new_state, groups)
    update = max((sizes.change[p] for p in gradients), default=0.0)

    def wider(*bounds: Tolerance | None) -> Tolerance:
        return tolerance or max((b for b in bounds if b), key=lambda b: b.rtol)

    def of_state(path: Path, dtype: Any) -> tuple[str, Any, float]:
        group, rule, bound, share = groups[path], "leaf", wider(_tolerance(dtype)), 0.0
        if group and group[-1] in _MOMENTS:
            rule, bound = "moment", wider(MOMENTS, _tolerance(dtype), computed_in)
        elif computed_in and not tolerance:
            share = computed_in.rtol * sizes.change[path] + computed_in.atol * sizes.change[group]
        if path in gradients:
            rule = "normalised"
            share = share + update * _noise_share(*gradients[path], wider(MOMENTS, computed_in))
        return rule, bound.rtol * sizes.leaf[path] + bound.atol * sizes.tree[group] + share, bound.rtol

    def of_output(path: Path, dtype: Any) -> tuple[str, Any, float]:
        bound = wider(_tolerance(dtype), computed_in)
        return "leaf", bound.rtol * sizes.leaf["out", *path] + bound.atol * sizes.tree["out", *path[:1]], bound.rtol

    out = []
    for path in {**new_state, **result[0]}:
        group = "/".join(("state", *groups.get(path, path[:1])))
        out.append(_compare("/".join(("state", *path)), group, new_state.get(path),
                            result[0].get(path), functools.partial(of_state, path)))
    for path in {**outputs, **result[1]}:
        group = "/".join(("out", *path[:1]))
        out.append(_compare("/".join(("out", *path)), group, outputs.get(path),
                            result[1].get(path), functools.partial(of_output, path)))
    return tuple(out)


def _compare(
    path: str, group: str, mine: Leaf | None, other: Leaf | None,
    bound: Callable[[Any], tuple[str, Any, float]],
) -> Difference:
    wrong = _structure(mine, other)
    if mine is None or other is None or wrong:
        return Difference(path, group, "structure", np.inf, 0.0, 0.0, np.inf, 0.0, wrong)
    if not _is_float(mine.value.dtype):
        return _exact(path, group, mine, other)
    rule, allowed, rtol = bound(mine.value.dtype)
    return _judge(path, group, rule, mine, other, np.broadcast_to(allowed, mine.value.shape), rtol)


def _judge(
    path: str, group: str, rule: str, mine: Leaf, other: Leaf, allowed: np.ndarray, rtol: float
) -> Difference:
    a, b = _as_wide(mine.value), _as_wide(other.value)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        difference = np.where(same, 0.0, np.abs(a - b))
    difference = np.where(np.isnan(difference), np.inf, difference)
    if mine.value.dtype.itemsize < 4:
        info = _finfo(mine.value.dtype)
        finite = np.where(np.isfinite(a), np.abs(a), 0.0)
        allowed = allowed + np.maximum(finite, float(info.tiny)) * float(info.eps)
    if not difference.size:
        return Difference(path, group, rule, 0.0, 0.0, 0.0, 0.0, rtol)
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(difference == 0, 0.0, difference / allowed)
    at = int(np.argmax(excess))
    note = ""
    if not np.isfinite(a).all():
        note = f"{int((~np.isfinite(a)).sum())} of {a.size} elements of plain jit are not finite"
    worst = float(excess.flat[at])
    return Difference(
        path, group, rule, float(difference.max()), _size(mine.value), float(allowed.flat[at]),
        rtol * worst if rtol else (0.0 if worst <= 1 else np.inf), rtol, note,
    )


def _exact(path: str, group: str, mine: Leaf, other: Leaf) -> Difference:
    a, b = mine.value, other.value
    unequal = int((a != b).sum())
    difference = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) if unequal else 0.0
    note = f"{unequal} of {a.size} elements differ; {mine.dtype} must be exact" if unequal else ""
    return Difference(path, group, "exact", difference, _size(a.astype(np.float64)), 0.0,
                      np.inf if unequal else 0.0, 0.0, note)


def _structure(mine: Leaf | None, other: Leaf | None) -> str:
    if other is None:
        return "missing: plain jit returns this leaf"
    if mine is None:
        return "unexpected: plain jit returns no such leaf"
    parts = []
    for name, a, b in (("shape", mine.value.shape, other.value.shape),
                       ("dtype", mine.dtype, other.dtype),
                       ("weak type", mine.weak_type, other.weak_type)):
        if a != b:
            parts.append(f"{name} {b}, plain jit gives {a}")
    return "; ".join(parts)


def _noise_share(size: np.ndarray, leaf: float, group: float, bound: Tolerance) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (bound.rtol * leaf + bound.atol * group) / size
    return np.minimum(2.0, 2.0 * np.where(np.isnan(share), np.inf, share))


class _Sizes:
    """The largest magnitude of every leaf and tree, and of what the step changed in them."""

    def __init__(
        self, state: Mapping[Path, Leaf], outputs: Mapping[Path, Leaf],
        before: Mapping[Path, Leaf], groups: Mapping[Path, Path],
    ):
        self.leaf: dict[Path, float] = {}
        self.tree: dict[Path, float] = {}
        self.change: dict[Path, float] = {}

        def note(sizes: dict[Path, float], key: Path, size: float) -> None:
            sizes[key] = max(sizes.get(key, 0.0), size)

        for path, leaf in state.items():
            if _is_float(leaf.value.dtype):
                old = before.get(path)
                change = _as_wide(leaf.value)
                if old is not None and old.value.shape == leaf.value.shape:
                    with np.errstate(invalid="ignore"):
                        change = change - _as_wide(old.value)
                note(self.leaf, path, _size(leaf.value))
                note(self.tree, groups[path], _size(leaf.value))
                note(self.change, path, _size(change))
                note(self.change, groups[path], _size(change))
        for path, leaf in outputs.items():
            if _is_float(leaf.value.dtype):
                note(self.leaf, ("out", *path), _size(leaf.value))
                note(self.tree, ("out", *path[:1]), _size(leaf.value))


def _state_groups(leaves: Mapping[Path, Leaf]) -> dict[Path, Path]:
    """Returns, per path, the prefix that names its tree.

    Optimizer states repeat the parameters' paths below a field of their own. The tree of
    `opt_state/0/mu/l0/w` ends at `mu`, by its name; that of `opt_state/0/trace/l0/w` at `trace`,
    since `l0/w` is also what another part of the state holds; that of `params/l0/w` is its first key.
    """
    prefixes = {p[:k] for p in leaves for k in range(len(p) + 1)}
    tops: dict[Path, set[str]] = {}
    endings: set[Path] = set()
    for p in leaves:
        tops.setdefault(p[1:], set()).add(p[0] if p else "")
        if not any(name.startswith("opt") for name in p):
            endings |= {p[k:] for k in range(1, len(p))}

    def is_moment(p: Path, k: int) -> bool:
        above = p[:k]
        fields = {f for f in ("count", *_MOMENTS) if (*above, f) in prefixes}
        stated = len(fields) > 1 or any(name.startswith("opt") for name in above)
        repeats = not endings or p[k + 1 :] in endings
        return p[k] in _MOMENTS and stated and repeats and "params" not in above

    def group(p: Path) -> Path:
        for k in range(len(p) - 1):
            if is_moment(p, k):
                return p[: k + 1]
        for k in range(1, len(p)):
            if tops.get(p[k:], set()) - {p[0]}:
                return p[:k]
        return p[: min(1, max(0, len(p) - 1))]

    return {p: group(p) for p in leaves}


def _gradient_sizes(
    leaves: Mapping[Path, Leaf], groups: Mapping[Path, Path]
) -> dict[Path, tuple[np.ndarray, float, float]]:
    """Returns, per parameter under a normalising optimizer, the size of its gradient.

    That is sqrt(v) of its second moment, or |mu| where there is no second moment: per element, the
    largest of the leaf, and the largest of the tree.
    """
    kinds: dict[Path, str] = {}
    prefixes = set(groups.values())
    for prefix in prefixes:
        if not prefix:
            continue
        if prefix[-1] in _SECOND_MOMENTS:
            kinds[prefix] = "second"
        elif prefix[-1] in _FIRST_MOMENTS and not any(
            (*prefix[:-1], s) in prefixes for s in _SECOND_MOMENTS
        ):
            kinds[prefix] = "first"
    sizes: dict[Path, list[tuple[np.ndarray, Path]]] = {}  # by the path below the moment's field
    largest: dict[Path, float] = {}
    for path, leaf in leaves.items():
        prefix = groups[path]
        if prefix in kinds and _is_float(leaf.value.dtype):
            size = np.abs(_as_wide(leaf.value))
            size = np.sqrt(size) if kinds[prefix] == "second" else size
            sizes.setdefault(path[len(prefix):], []).append((size, prefix))
            largest[prefix] = max(largest.get(prefix, 0.0), _size(size))
    out = {}
    for path, leaf in leaves.items():
        prefix = groups[path]
        if not _is_float(leaf.value.dtype) or (prefix and prefix[-1] in _MOMENTS):
            continue
        for size, owner in sizes.get(path[len(prefix):], ()):
            if size.shape == leaf.value.shape:
                out[path] = (size, _size(size), largest[owner])
                break
    return out


def _size(x: np.ndarray) -> float:
    """Returns the largest finite magnitude, 0.0 when there is none."""
    x = np.abs(_as_wide(x))
    return float(x[np.isfinite(x)].max(initial=0.0))


def _as_wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _is_float(dtype: Any) -> bool:
    from jax import numpy as jnp

    return bool(jnp.issubdtype(dtype, np.inexact))


def _finfo(dtype: Any) -> Any:
    from jax import numpy as jnp

    return jnp.finfo(dtype)


def _tolerance(dtype: Any) -> Tolerance:
    bits = int(_finfo(dtype).nmant)
    return next(t for most, t in _BY_MANTISSA if bits <= most)


def worst(differences: Sequence[Difference], count: int) -> list[Difference]:
    """Returns the `count` leaves that come closest to their bound, or are furthest past it."""
    return sorted(differences, key=lambda d: (-d.excess, d.path))[:count]
