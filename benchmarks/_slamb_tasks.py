"""The problems `slamb.py` trains, and the loop that trains them: N workers by vmap, steps by scan."""

from __future__ import annotations

import functools
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._slamb_arms import AXIS, Arm


@dataclass(frozen=True)
class Task:
    """A training problem.

    Attributes:
      name: as printed.
      init: key to parameters.
      loss: `(params, batch) -> []`, the mean over the batch.
      data: what batches are drawn from; passed to `draw`.
      draw: `(data, key, examples) -> batch` with a leading axis of so many examples.
      measure: `params -> dict` of figures on held-out data.
      batch: examples a step, over all workers.
    """

    name: str
    init: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    data: Any
    draw: Callable[..., Any]
    measure: Callable[[Any], dict[str, Any]]
    batch: int


def warm_up_cosine(t, steps):
    """Learning rate as a fraction of its peak at 1-based step t: a tenth of warm-up, then cosine."""
    warm = jnp.maximum(steps // 10, 1)
    down = 0.5 * (1 + jnp.cos(jnp.pi * (t - 1 - warm) / jnp.maximum(steps - warm, 1)))
    return jnp.where(t - 1 < warm, t / warm, jnp.clip(down, 0, 1))


def stepper(arm: Arm, task: Task, workers: int, schedule=warm_up_cosine):
    """Returns `(start, advance)`, a training that can be cut into pieces between any two steps.

    `start(key)` gives what is carried: all workers' parameters and optimizer state, with a leading
    worker axis where they differ. `advance(carry, steps_done, count, of, learning_rate, key)` takes
    `count` steps (static) of a run of `of` and returns the carry and the `count` losses. A step draws
    one global batch from the key and its number, the same for every arm and any number of workers,
    and cuts it into equal slices.
    """

    def start(key):
        params = task.init(jax.random.fold_in(key, 0))
        return _stack(params, workers), _stack(arm.init(params), workers)

    def body(data, of, learning_rate, key, carry, t):
        params, state = carry
        batch = task.draw(data, jax.random.fold_in(jax.random.fold_in(key, 1), t), task.batch)
        batch = jax.tree.map(lambda a: a.reshape(workers, -1, *a.shape[1:]), batch)
        rate = learning_rate * schedule(t, of)

        loss, grads = jax.vmap(jax.value_and_grad(task.loss))(params, batch)
        axes = jax.tree.map(lambda a: 0 if is_local(a) else None, state)
        branches = [
            jax.vmap(functools.partial(arm.step, learning_rate=rate, phase=phase),
                     in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
            for phase in range(len(arm.phases))]
        if len(branches) == 1:
            params, state = branches[0](params, state, grads)
        else:
            params, state = jax.lax.switch(arm.phase_of(t), branches, params, state, grads)
        return (params, state), loss.mean()

    @functools.partial(jax.jit, static_argnums=3, donate_argnums=1)
    def run(data, carry, steps_done, count, of, learning_rate, key):
        return jax.lax.scan(functools.partial(body, data, of, learning_rate, key), carry,
                            steps_done + jnp.arange(1, count + 1))

    def advance(carry, steps_done, count, of, learning_rate, key):
        return run(task.data, carry, steps_done, count, of, jnp.float32(learning_rate), key)

    return start, advance


def trainer(arm: Arm, task: Task, steps: int, workers: int, schedule=warm_up_cosine):
    """Returns `(learning_rate, seed) -> (averaged parameters, spread, losses[steps])`."""
    start, advance = stepper(arm, task, workers, schedule)

    def train(learning_rate, seed):
        key = jax.random.key(seed)
        (params, _), losses = advance(start(key), 0, steps, steps, learning_rate, key)
        return *averaged(params), losses

    return train


@jax.jit
def averaged(params):
    """The mean of the workers' parameters, and their distance from it relative to its norm."""
    mean = jax.tree.map(lambda a: a.mean(0), params)

    def total(tree):
        return sum(jnp.sum(a * a) for a in jax.tree.leaves(tree))

    workers = jax.tree.leaves(params)[0].shape[0]
    away = total(jax.tree.map(lambda a, b: a - b, params, mean)) / workers
    return mean, jnp.sqrt(away / total(mean))


def _stack(tree, workers: int):
    return jax.tree.map(
        # A copy: the carry is donated.
        lambda a: jnp.array(jnp.broadcast_to(a, (workers, *jnp.shape(a))) if is_local(a) else a), tree)


def is_local(a) -> bool:
    """Floating state differs by worker; counts do not."""
    return jnp.issubdtype(jnp.result_type(a), jnp.floating)


# ---- scikit-learn's digits ---------------------------------------------------------------------


def digits(batch=512, hidden=256) -> Task:
    """1,280 training and 517 test images of 8 by 8, an MLP of 85,000 parameters."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32)
    x = (x - x.mean(0)) / (x.std(0) + 1e-3)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = jnp.array(x[order]), jnp.array(y[order], jnp.int32)
    train, test = (x[:1280], y[:1280]), (x[1280:], y[1280:])

    def init(key):
        keys = jax.random.split(key, 3)

        def dense(k, a, b):
            return jax.random.normal(k, (a, b)) * (2 / a) ** 0.5

        return {"w0": dense(keys[0], 64, hidden), "b0": jnp.zeros(hidden),
                "w1": dense(keys[1], hidden, hidden), "b1": jnp.zeros(hidden),
                "w2": dense(keys[2], hidden, 10), "b2": jnp.zeros(10)}

    def logits(params, x):
        h = jax.nn.relu(x @ params["w0"] + params["b0"])
        h = jax.nn.relu(h @ params["w1"] + params["b1"])
        return h @ params["w2"] + params["b2"]

    def loss(params, batch):
        return optax.softmax_cross_entropy_with_integer_labels(
            logits(params, batch[0]), batch[1]).mean()

    def draw(data, key, examples):
        index = jax.random.permutation(key, data[0].shape[0])[:examples]
        return data[0][index], data[1][index]

    @jax.jit
    def measure(params):
        return {"accuracy_percent": 100 * jnp.mean(logits(params, test[0]).argmax(-1) == test[1]),
                "train_loss": loss(params, train)}

    return Task("digits", init, loss, train, draw, measure, batch)


# ---- a masked language model on Python's own documentation -------------------------------------

SYMBOLS, MASK = 64, 63


def documentation() -> np.ndarray:
    """About 0.7 MB of English: the topics of Python's `help()`, as symbols 0 to 62 by frequency."""
    text = "\n".join(pydoc_data.topics.topics.values()).lower().encode("ascii", "ignore")
    raw = np.frombuffer(text, np.uint8)
    by_frequency = np.argsort(-np.bincount(raw, minlength=256), kind="stable")
    table = np.full(256, SYMBOLS - 2, np.int32)  # the rare ones share a symbol
    table[by_frequency[: SYMBOLS - 2]] = np.arange(SYMBOLS - 2)
    return table[raw]


def masked_lm(batch=512, length=16, width=32, heads=4, hidden=128) -> Task:
    """A one-layer encoder of 15,000 parameters; 3 of every 16 characters are to be filled in."""
    text = documentation()
    cut = int(0.9 * len(text))
    train, held_out = jnp.array(text[:cut]), jnp.array(text[cut:])
    masked = length * 3 // 16

    def init(key):
        keys = iter(jax.random.split(key, 9))

        def dense(a, b):
            return jax.random.normal(next(keys), (a, b)) * a**-0.5

        return {"embed": 0.05 * jax.random.normal(next(keys), (SYMBOLS, width)),
                "place": 0.05 * jax.random.normal(next(keys), (length, width)),
                "query": dense(width, width), "key_value": dense(width, 2 * width),
                "out": dense(width, width),
                "up": dense(width, hidden), "down": dense(hidden, width),
                "norm1": jnp.ones(width), "norm2": jnp.ones(width), "norm3": jnp.ones(width),
                "bias": jnp.zeros(SYMBOLS)}

    def norm(x, scale):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    def loss(params, batch):
        tokens, where = batch
        symbols = jnp.put_along_axis(
            tokens, where, jnp.full_like(where, MASK), axis=1, inplace=False)
        h = params["embed"][symbols] + params["place"]
        x = norm(h, params["norm1"])
        # One layer: what is not asked for is only attended to, so it needs keys and values alone.
        asked = where[:, :, None]
        h, of_asked = (jnp.take_along_axis(a, asked, axis=1) for a in (h, x))
        q = (of_asked @ params["query"]).reshape(*where.shape, heads, -1)
        k, v = jnp.split((x @ params["key_value"]).reshape(*tokens.shape, heads, -1), 2, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
        h = h + mixed.reshape(h.shape) @ params["out"]
        h = h + jax.nn.gelu(norm(h, params["norm2"]) @ params["up"]) @ params["down"]
        logits = norm(h, params["norm3"]) @ params["embed"].T + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.take_along_axis(tokens, where, axis=1)).mean()

    def draw(data, key, examples):
        first, second = jax.random.split(key)
        start = jax.random.randint(first, (examples,), 0, data.shape[0] - length)
        tokens = data[start[:, None] + jnp.arange(length)]
        _, where = jax.lax.top_k(jax.random.uniform(second, (examples, length)), masked)
        return tokens, where

    @jax.jit
    def measure(params):
        return {"held_out_nat": loss(params, draw(held_out, jax.random.key(99), 8192))}

    return Task("masked language model", init, loss, train, draw, measure, batch)


# ---- problems whose workers disagree, with a known optimum -------------------------------------


def quadratic(workers=8, shape=(100, 200), spread=1.0, noise=0.3) -> Task:
    """Each worker its own curvature and its own optimum; the best for all is known in closed form.

    Worker i has f_i(w) = mean a_i (w - c_i)^2 / 2 with a_i from 0.1 to 10 (log-uniform) and
    c_i = c + spread * normal; a gradient carries noise of +-`noise`. A batch is the worker's number and a key.
    """
    keys = jax.random.split(jax.random.key(7), 3)
    curvature = 10.0 ** jax.random.uniform(keys[0], (workers, *shape), minval=-1.0, maxval=1.0)
    common = jax.random.normal(keys[1], shape)
    centre = common + spread * jax.random.normal(keys[2], (workers, *shape))
    best = jnp.sum(curvature * centre, 0) / jnp.sum(curvature, 0)

    def init(key):
        return {"w": jax.random.normal(key, shape)}

    def loss(params, batch):
        # The whole batch of one worker, or all workers' at once for arms that run as one.
        who, noise_key = batch
        def of(i, key):
            a, c = curvature[i], centre[i]
            # One size, either sign: moments see the variance alone, and a bit is cheap to draw.
            sign = (jax.random.bits(key, shape, jnp.uint8) & 1).astype(jnp.float32)
            pull = noise * (2.0 * sign - 1.0)
            return jnp.mean(0.5 * a * (params["w"] - c) ** 2 + pull * params["w"])
        return jnp.mean(jax.vmap(of)(who, noise_key))

    def draw(data, key, examples):
        who = jnp.arange(workers)
        return who, jax.vmap(lambda i: jax.random.fold_in(key, i))(who)

    @jax.jit
    def measure(params):
        excess = jnp.mean(0.5 * curvature.mean(0) * (params["w"] - best) ** 2)
        return {"excess": excess}

    return Task(f"quadratic, spread {spread:g}", init, loss, jnp.zeros([]), draw, measure, workers)


def logistic(workers=8, features=256, classes=10, examples=512, batch=256, skew=0.3) -> Task:
    """Multinomial logistic regression on workers with different labels: Dirichlet shares of classes.

    The optimum of the mean of the workers' regularised losses is found to 1e-10 by L-BFGS.
    """
    rng = np.random.default_rng(11)
    teacher = rng.normal(size=(features, classes)) / features**0.5 * 3
    share = rng.dirichlet(np.full(classes, skew), size=workers)
    x = rng.normal(size=(workers * examples * 12, features)).astype(np.float32)
    y = (x @ teacher + rng.gumbel(size=(len(x), classes))).argmax(1)
    pools = [list(np.flatnonzero(y == c)) for c in range(classes)]
    chosen = [[pools[c].pop() for c in rng.choice(classes, size=examples, p=share[i])]
              for i in range(workers)]
    x, y = jnp.array(x[np.array(chosen)]), jnp.array(y[np.array(chosen)], jnp.int32)
    decay = 1e-3

    def init(key):
        return {"w": 0.1 * jax.random.normal(key, (features, classes))}

    def loss(params, sample):
        logits = sample[0] @ params["w"]
        return (optax.softmax_cross_entropy_with_integer_labels(logits, sample[1]).mean()
                + decay * jnp.sum(params["w"] ** 2))

    def whole(params):
        return jnp.mean(jax.vmap(lambda a, b: loss(params, (a, b)))(x, y))

    solver = optax.lbfgs()
    @jax.jit
    def solve(params):
        value_and_grad = optax.value_and_grad_from_state(whole)
        def body(carry, _):
            params, state = carry
            value, grads = value_and_grad(params, state=state)
            updates, state = solver.update(
                grads, state, params, value=value, grad=grads, value_fn=whole)
            return (optax.apply_updates(params, updates), state), value
        (params, _), _ = jax.lax.scan(body, (params, solver.init(params)), length=200)
        return whole(params)

    best = solve({"w": jnp.zeros((features, classes))})

    def draw(data, key, count):
        per = count // workers
        index = jax.vmap(lambda k: jax.random.permutation(k, examples)[:per])(
            jax.random.split(key, workers))
        pick = jax.vmap(lambda a, i: a[i])
        return pick(data[0], index).reshape(count, features), pick(data[1], index).reshape(count)

    @jax.jit
    def measure(params):
        return {"excess": whole(params) - best}

    return Task(f"logistic, skew {skew:g}", init, loss, (x, y), draw, measure, batch)


# ---- large batches -----------------------------------------------------------------------------


def classification(batch: int, examples=20_480, features=100, hidden=192, classes=10) -> Task:
    """Synthetic classes with four clusters each among noise features; an MLP of 58,000 parameters."""
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(classes * 4, 20)) * 1.2
    which = rng.integers(0, classes * 4, size=examples + 4096)
    x = rng.normal(size=(len(which), features)).astype(np.float32)
    x[:, :20] += centres[which]
    x = x @ np.linalg.qr(rng.normal(size=(features, features)))[0].astype(np.float32)
    x, y = jnp.array(x), jnp.array(which % classes, jnp.int32)
    train, test = (x[:examples], y[:examples]), (x[examples:], y[examples:])

    def init(key):
        keys = jax.random.split(key, 3)

        def dense(k, a, b):
            return jax.random.normal(k, (a, b)) * (2 / a) ** 0.5

        return {"w0": dense(keys[0], features, hidden), "b0": jnp.zeros(hidden),
                "w1": dense(keys[1], hidden, hidden), "b1": jnp.zeros(hidden),
                "w2": dense(keys[2], hidden, classes), "b2": jnp.zeros(classes)}

    def loss(params, sample):
        h = jax.nn.relu(sample[0] @ params["w0"] + params["b0"])
        h = jax.nn.relu(h @ params["w1"] + params["b1"])
        return optax.softmax_cross_entropy_with_integer_labels(
            h @ params["w2"] + params["b2"], sample[1]).mean()

    def draw(data, key, count):
        index = jax.random.randint(key, (count,), 0, examples)
        return data[0][index], data[1][index]

    @jax.jit
    def measure(params):
        return {"held_out_nat": loss(params, test)}

    return Task(f"classification, batch {batch}", init, loss, train, draw, measure, batch)
