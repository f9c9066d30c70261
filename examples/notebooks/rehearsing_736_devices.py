# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Rehearsing a 736-device cluster from a laptop: would my model fit, and what would a step take?
#
# Four sites with 736 devices of four kinds, none of which we have, and a GPT of more than a billion parameters, which
# no laptop holds. Types are enough: the step is traced, planned, cut, sharded, scheduled and priced without an array.

# %%
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import hetjax
from hetjax import notebook
from hetjax.demo.linen_gpt import GPT, train_step
from hetjax.demo.training import Config

# %% [markdown]
# ## The cluster

# %%
SITES = {"lyon": ("a100-80g", 40), "oslo": ("h200", 16), "porto": ("v100-16g", 24), "graz": ("t4", 12)}
text = 'name = "four-sites"\n[links.wan]\nbetween = ["lyon", "oslo", "porto", "graz"]\nbandwidth_gbit_s = 10\nlatency_ms = 9\n'
for site, (kind, nodes) in SITES.items():
    text += f'[[sites]]\nname = "{site}"\nlink = "infiniband-hdr"\n[[sites.nodes]]\nkind = "{kind}"\ndevices = 8\ncount = {nodes}\n'
cluster = hetjax.Cluster.parse(text)
assert cluster.num_devices == 736
cluster

# %% [markdown]
# ## The model: a GPT of 24 blocks, width 2048

# %%
config = Config(vocab_size=32_000, length=512, width=2048, num_heads=16, num_layers=24)
model, optimizer = GPT(config), optax.adamw(1e-4)
tokens = jax.ShapeDtypeStruct((2048, config.length), jnp.int32)


def create(key):
    params = model.init(key, jnp.zeros((1, config.length), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


state = jax.eval_shape(create, jax.random.key(0))
num_params = sum(x.size for x in jax.tree.leaves(state.params))
print(f"{num_params / 1e9:.2f} billion parameters")

# %% [markdown]
# ## The rehearsal
#
# Prices are whatever you pay; these are made up. One stage a site is the plan; microbatches and meshes are ours.

# %%
prices = {"a100-80g": 1.5, "h200": 3.0, "v100-16g": 0.6, "t4": 0.2}
options = {"num_microbatches": 8, "mesh": "32,10;32,4;32,6;32,3"}
rehearsal = hetjax.rehearse(
    train_step, cluster, state, {"tokens": tokens, "targets": tokens}, prices=prices, currency="EUR", options=options
)
print(rehearsal)

# %% [markdown]
# ## What if the microbatches were half as large?

# %%
half = rehearsal.plan.with_(num_microbatches=16)
half.delta

# %% [markdown]
# ## The answer
#
# Where every device is busy, and where it waits for the slow link.

# %%
notebook.gantt(half, title="736 devices in four sites")
