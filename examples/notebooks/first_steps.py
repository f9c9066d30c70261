# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps: does my train step give the same numbers on two sites?
#
# A small GPT and its train step, ordinary Flax code. We put it on two unlike sites of devices, compare it with plain
# `jax.jit` leaf by leaf, and look at what runs where. Eight CPU devices stand for the accelerators.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "32"  # threads enough for eight devices on few cores
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import optax

import hetjax
from hetjax import notebook
from hetjax.demo.linen_gpt import create, train_step
from hetjax.demo.session import CLUSTER
from hetjax.demo.training import Config

# %% [markdown]
# ## The devices
#
# Two fast ones here, six slow ones there, ten gigabit and two milliseconds between them, as a TOML file says.

# %%
cluster = hetjax.Cluster.from_toml(CLUSTER)
cluster

# %% [markdown]
# ## The step
#
# Nothing in it knows of stages, microbatches or sharding.

# %%
config = Config(vocab_size=32, length=8, width=16, num_heads=2, num_layers=2)
state = create(config, optax.sgd(0.1, momentum=0.9))
tokens = jax.random.randint(jax.random.key(1), (24, config.length + 1), 0, config.vocab_size)
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

# %% [markdown]
# ## The same numbers?
#
# `hetjax.check` runs the step both ways from the same state and compares every leaf of the new state and of the outputs.
# Microbatches are not assumed to add up: that is proved on the traced program.

# %%
options = {"cluster": cluster, "num_microbatches": 4, "mesh": "2,1;2,1", "rehearse": True}
report = hetjax.check(train_step, state, [batch] * 2, steps=2, **options)
report

# %%
assert report.ok

# %% [markdown]
# ## What runs where
#
# The answer, in one picture: two stages, four microbatches, what crosses the slow link, and how long every part should
# take on the devices described.

# %%
parallel = hetjax.parallelize(train_step, **options)
parallel.plan_for(state, batch)
notebook.gantt(parallel)
