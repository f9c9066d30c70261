"""A linen GPT whose state never stands whole on one device: created, trained, averaged, evaluated and
restored where the plan keeps it.

    python examples/gpt_linen.py --steps 100 --out out/linen

On CPU, as two unlike sites; a second run with another number of stages restores onto another plan:

    export XLA_FLAGS=--xla_force_host_platform_device_count=8 NPROC=32
    python examples/gpt_linen.py --steps 100 --cluster hetjax/demo/two_sites.toml
    python examples/gpt_linen.py --steps 200 --cluster hetjax/demo/two_sites.toml --stages 1
"""

import argparse
import itertools
import pathlib

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import hetjax
from hetjax.demo.linen_gpt import GPT
from hetjax.demo.text import batches, load_corpus
from hetjax.demo.training import Config


def loss_of(apply_fn, params, batch):
    logits = apply_fn({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn, p, batch))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def eval_step(state, params, batch):
    return loss_of(state.apply_fn, params, batch)


def update_average(average, state):
    return jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, state.params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/linen"))
    parser.add_argument("--cluster", help="a cluster as TOML; the local devices when left out")
    parser.add_argument("--stages", type=int)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()

    corpus = load_corpus()
    config = Config(corpus.vocab_size, args.length, args.width, num_layers=args.layers)
    model, optimizer = GPT(config), optax.adamw(3e-3)

    def create_state():
        params = model.init(jax.random.key(0), jnp.zeros((1, config.length), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    train = hetjax.parallelize(train_step, cluster=args.cluster, num_stages=args.stages)
    evaluate = hetjax.parallelize(eval_step, like=train)
    average_of = hetjax.parallelize(update_average, like=train)

    # A plan needs shapes only; with it, every leaf is made on the devices that will keep it.
    stream = batches(corpus.train, args.batch, args.length, seed=0)
    train.plan_for(jax.eval_shape(create_state), next(stream))
    print(train.explain())
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager((args.out / "checkpoints").absolute(), options=options) as checkpoints:
        first = checkpoints.latest_step() or 0
        if first:
            state = checkpoints.restore(first, args=ocp.args.StandardRestore(train.abstract_state()))
            print(f"restored step {first} onto {train.plan.num_stages} stages")
        else:
            state = hetjax.init(create_state, like=train)
        average = state.params
        for step, batch in zip(range(first, args.steps), itertools.islice(stream, first, None)):
            state, metrics = train(state, batch)
            average = average_of(average, state)
            if (step + 1) % 50 == 0 or step + 1 == args.steps:
                print(f"step {step + 1}: loss {float(metrics['loss']):.6f}")
        checkpoints.save(args.steps, args=ocp.args.StandardSave(state))
        checkpoints.wait_until_finished()

    held_out = next(batches(corpus.held_out, args.batch, args.length, seed=1))
    print(f"held out {float(evaluate(state, state.params, held_out)):.6f}, averaged parameters "
          f"{float(evaluate(state, average, held_out)):.6f}")


if __name__ == "__main__":
    main()
