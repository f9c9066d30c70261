"""Trains a small GPT: nnx, an optax schedule, evaluation, a loader, orbax checkpoints, a metrics log.

An ordinary script. Two lines make it parallel; both are marked. Without them it trains on one device
and gives the same numbers.

    python examples/gpt_nnx.py --steps 200 --out out/gpt
    python examples/gpt_nnx.py --steps 400 --out out/gpt        # goes on where it stopped

On CPU, as two unlike sites:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 NPROC=32 \\
    HETJAX_CLUSTER=hetjax/demo/two_sites.toml python examples/gpt_nnx.py --out out/gpt
"""

import argparse
import json
import os
import pathlib
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import hetjax  # added: 1

# ------------------------------------------------------------------------------------------- model


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, vocab: int, length: int, width: int, heads: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))  # the embedding is tied


def loss_of(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return losses.mean()


@hetjax.parallelize(cluster=os.environ.get("HETJAX_CLUSTER"))  # added: 2
@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    norm = optax.tree.norm(grads)
    optimizer.update(model, grads)
    return {"loss": loss, "grad_norm": norm}


eval_step = nnx.jit(loss_of)

# -------------------------------------------------------------------------------------------- data


class Loader:
    """Windows of text. The batch of a step depends on nothing but its number, so a run can resume."""

    def __init__(self, tokens, batch: int, length: int, seed: int):
        self.tokens, self.batch, self.length, self.seed = tokens, batch, length, seed

    def __call__(self, step: int):
        starts = np.random.default_rng((self.seed, step)).integers(0, len(self.tokens) - self.length, self.batch)
        window = self.tokens[starts[:, None] + np.arange(self.length + 1)]
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}


def read_text():
    text = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    position = {c: i for i, c in enumerate(alphabet)}
    tokens = np.array([position[c] for c in text], np.int32)
    return tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :], len(alphabet)


# ------------------------------------------------------------------------------------------- script


class MetricsLog:
    """One JSON object a line; what a run already wrote stays."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def write(self, step: int, **values):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step} | {k: float(v) for k, v in values.items()}) + "\n")


def evaluate(model, loader: Loader, batches: int) -> float:
    graphdef, state = nnx.split(model)
    snapshot = nnx.merge(graphdef, jax.device_get(state))  # training may go on meanwhile
    return float(np.mean([eval_step(snapshot, loader(i)) for i in range(batches)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/gpt"))
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--schedule-steps", type=int, default=1000)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    train_tokens, held_out, vocab = read_text()
    train_loader = Loader(train_tokens, args.batch, args.length, seed=0)
    eval_loader = Loader(held_out, args.batch, args.length, seed=1)
    schedule = optax.warmup_cosine_decay_schedule(3e-4, 3e-3, 20, args.schedule_steps, 3e-4)
    model = GPT(vocab, args.length, args.width, args.heads, args.layers, nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), wrt=nnx.Param
    )

    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    log = MetricsLog(args.out / "metrics.jsonl")
    with ocp.CheckpointManager((args.out / "checkpoints").absolute(), options=options) as checkpoints:
        first = 0
        if checkpoints.latest_step() is not None:
            first = checkpoints.latest_step()
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state((model, optimizer)))
            restored = checkpoints.restore(first, args=ocp.args.StandardRestore(abstract))
            nnx.update((model, optimizer), restored)
            print(f"resumed at step {first}")

        begin = time.perf_counter()
        for step in range(first, args.steps):
            metrics = train_step(model, optimizer, train_loader(step))
            done = step + 1
            log.write(done, **metrics, learning_rate=schedule(step))
            if done % args.eval_every == 0 or done == args.steps:
                held_out_loss = evaluate(model, eval_loader, 2)
                log.write(done, held_out_loss=held_out_loss)
                print(f"step {done}: loss {float(metrics['loss']):.4f}, held out {held_out_loss:.4f}")
            if done % args.save_every == 0 or done == args.steps:
                checkpoints.save(done, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
        checkpoints.wait_until_finished()
    print(f"{args.steps - first} steps in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
