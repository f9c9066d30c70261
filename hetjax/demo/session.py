"""The demo without its screen: train across two sites, then compare with plain jit."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

BATCH_SIZE = 48
NUM_MICROBATCHES = 4
PARITY_STEPS = 3
MAX_ERROR_RATIO = 3.0
CLUSTER = pathlib.Path(__file__).with_name("two_sites.toml")


@dataclasses.dataclass
class Session:
    """A model under training.

    Attributes:
      framework: "linen" or "nnx".
      config: the model's size.
      corpus: the text.
      num_steps: the length of the learning-rate schedule.
      optimizer: AdamW on that schedule.
      step, evaluate: parallel, or under plain jit.
      state: a linen TrainState, or (model, optimizer), trained in place.
      fresh: returns the state as it was before the first step.
      parallelize: makes a step parallel as `step` is; parity makes one more, with SGD.
    """

    framework: str
    config: Any
    corpus: Any
    num_steps: int
    optimizer: Any
    step: Callable[..., Any]
    evaluate: Callable[..., Any]
    state: Any
    fresh: Callable[[], Any]
    parallelize: Callable[[Any], Any]

    @property
    def num_params(self) -> int:
        import jax

        if self.framework == "linen":
            return sum(x.size for x in jax.tree.leaves(self.state.params))
        from flax import nnx

        return sum(x.size for x in jax.tree.leaves(nnx.state(self.state[0], nnx.Param)))

    @property
    def tokens_per_step(self) -> int:
        return BATCH_SIZE * self.config.length

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must cross between stages per step: an activation and its cotangent per cut, f32."""
        cuts = self.step.plan.num_stages - 1
        return 2 * cuts * self.tokens_per_step * self.config.width * 4


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """One step whose loss has arrived.

    Attributes:
      step: its number, from 1.
      loss: in nats per character.
      elapsed_s: since training began.
    """

    step: int
    loss: float
    elapsed_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ParityRow:
    """How one tree compares after the first steps.

    Attributes:
      what: "SGD parameters".
      max_abs: the largest difference to plain jit in any leaf and step.
      of_bound: the largest difference in units of the tolerance: at most 1 when equal.
      worst: the leaf it is in.
      error, plain_error: of hetjax and of plain f32 jit against a float64 run: the norm of the
        difference over the norm of the tree.
    """

    what: str
    max_abs: float
    of_bound: float
    worst: str
    error: float
    plain_error: float

    @property
    def ratio(self) -> float:
        return self.error / self.plain_error if self.plain_error else float(self.error > 0)

    @property
    def ok(self) -> bool:
        return self.of_bound <= 1 and self.ratio <= MAX_ERROR_RATIO


def use_compilation_cache(folder: pathlib.Path) -> int:
    """Returns how many compiled programs JAX's persistent cache already holds; turns it on for all of them."""
    import jax

    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return sum(1 for _ in folder.glob("*-cache"))


def open_session(
    framework: str, num_steps: int, *, num_layers: int = 4, plain: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Session:
    """Returns a fresh model, its step and its evaluation, made parallel on the two sites.

    Args:
      framework: "linen" or "nnx".
      num_steps: the length of the learning-rate schedule.
      num_layers: of the model.
      plain: leave them under plain jit, on one device.
      progress: called with (fragment, done, total) as fragments are compiled.
    """
    import hetjax
    from hetjax.demo import training
    from hetjax.demo.text import load_corpus

    corpus = load_corpus()
    config = training.Config(corpus.vocab_size, num_layers=num_layers)
    optimizer = training.adamw(num_steps)
    fresh = fresh_states(framework, config, optimizer)
    gpt, jit = model_of(framework), jit_of(framework)

    def parallelize(step: Any) -> Any:
        if plain:
            return jit(step)
        # A model this small is quickest on one device; two stages are what there is to show.
        return hetjax.parallelize(
            step, cluster=CLUSTER, num_stages=2, num_microbatches=NUM_MICROBATCHES, progress=progress
        )

    parallel = parallelize(gpt.train_step)
    evaluate = jit(gpt.evaluate) if plain else hetjax.parallelize(gpt.evaluate, like=parallel)
    return Session(
        framework, config, corpus, num_steps, optimizer, parallel, evaluate, fresh(), fresh, parallelize
    )


def model_of(framework: str) -> Any:
    """Returns the module with the model and its `create`, `train_step`, `evaluate`: only that framework is imported."""
    return importlib.import_module(f"hetjax.demo.{framework}_gpt")


def jit_of(framework: str) -> Callable[..., Any]:
    """Returns the plain jit of a framework."""
    if framework == "linen":
        import jax

        return jax.jit
    from flax import nnx

    return nnx.jit


def fresh_states(framework: str, config: Any, optimizer: Any) -> Callable[[], Any]:
    """Returns a function that gives the same new state each time: equal structure, no shared objects."""
    state = model_of(framework).create(config, optimizer)
    if framework == "linen":
        return lambda: state
    import jax
    from flax import nnx

    graphdef, state = nnx.split(state)
    # merge takes over the variables it is given; a new tree of them keeps this one as it is.
    return lambda: nnx.merge(graphdef, jax.tree.map(lambda x: x, state))


def train(session: Session) -> Iterator[Tick]:
    """Trains; yields a `Tick` per step, once its loss has arrived.

    The loss is read two steps late: calls return before the work ends, and waiting for each would
    leave every site idle in turn.
    """
    from hetjax.demo.text import batches

    stream = batches(session.corpus.train, BATCH_SIZE, session.config.length, seed=0)
    pending: collections.deque[Any] = collections.deque()
    begin = time.perf_counter()
    for number in range(1, session.num_steps + 1):
        pending.append((number, advance(session, session.step, next(stream))))
        # The first is read at once: it says when compilation was over.
        while pending and (number == 1 or number == session.num_steps or len(pending) > 2):
            done, loss = pending.popleft()
            yield Tick(done, float(loss), time.perf_counter() - begin)


def advance(session: Session, step: Callable[..., Any], batch: Any) -> Any:
    """Takes one step and returns its loss, which may not be computed yet."""
    if session.framework == "linen":
        session.state, out = step(session.state, batch)
    else:
        out = step(*session.state, batch)
    return out["loss"]


def held_out_loss(session: Session, num_batches: int = 4) -> float:
    """Returns the mean loss on text that was not trained on, computed where the state lives."""
    from hetjax.demo.text import batches

    stream = batches(session.corpus.held_out, BATCH_SIZE, session.config.length, seed=1)
    trained = session.state if session.framework == "linen" else session.state[0]
    losses = [session.evaluate(trained, next(stream)) for _ in range(num_batches)]
    return sum(map(float, losses)) / num_batches


def parity(session: Session) -> Iterator[ParityRow]:
    """Yields how the first steps compare with plain jit: SGD's parameters, AdamW's moments.

    Each tree is also compared with a float64 run of plain jit, which has next to no rounding: whose
    error is how large.
    """
    import optax

    from hetjax.demo.text import batches
    from hetjax.frontend.parity import Case, run_plain, side_by_side

    linen = session.framework == "linen"
    step = model_of(session.framework).train_step

    def of_state(step: Callable[..., Any]) -> Callable[..., Any]:
        """A `Case` has one state; the nnx step takes its two objects one by one."""
        return step if linen else lambda objects, batch: step(*objects, batch)

    sgd = optax.sgd(0.1)
    arms = (
        ("SGD", session.parallelize(step), fresh_states(session.framework, session.config, sgd),
         {"params": "parameters", "0": "parameters"}),
        ("AdamW", session.step, session.fresh, {"mu": "first moments", "nu": "second moments"}),
    )
    for name, parallel, fresh, wanted in arms:

        def case(fresh: Callable[[], Any] = fresh) -> Case:
            stream = batches(session.corpus.train, BATCH_SIZE, session.config.length, seed=2)
            return Case(of_state(step), fresh(), stream, {"framework": session.framework})

        steps = list(side_by_side(case(), of_state(parallel), PARITY_STEPS))
        exact = run_plain(case(), PARITY_STEPS, x64=True)
        plain = run_plain(case(), PARITY_STEPS)
        differences = [d for s in steps for d in s.differences]
        for group in dict.fromkeys(d.group for d in differences):
            what = wanted.get(group.rpartition("/")[2])
            members = [d for d in differences if d.group == group and d.rule != "exact"]
            if what and members:
                paths = {tuple(d.path.split("/")[1:]) for d in members}
                yield _row(f"{name} {what}", members, *(_error(s, exact, paths) for s in (steps[-1].state, plain)))


def _row(what: str, differences: list[Any], error: float, plain_error: float) -> ParityRow:
    from hetjax.frontend.compare import worst

    top = worst(differences, 1)[0]
    return ParityRow(what, max(d.max_abs for d in differences), top.excess, top.path, error, plain_error)


def _error(state: Any, exact: Any, paths: set[tuple[str, ...]]) -> float:
    import numpy as np

    squares = sum(float(np.sum((state[p].value.astype(np.float64) - exact[p].value) ** 2)) for p in paths)
    size = sum(float(np.sum(exact[p].value ** 2)) for p in paths)
    return (squares / size) ** 0.5
