# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sharding a model you did not write: which device holds which part?
#
# The attention block is Flax's own. We have not written it, we do not annotate it, and we ask for tensor parallelism over
# four devices. Types are enough: not one array is made.

# %%
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import hetjax
from hetjax import notebook


class Classifier(nn.Module):
    """An encoder from parts that Flax ships."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(1000, 256)(tokens)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(num_heads=8)(nn.LayerNorm()(x))
            x = x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(axis=1))


model, optimizer = Classifier(), optax.adam(1e-3)


def train_step(state, batch):
    params, moments = state

    def loss_fn(params):
        logits = model.apply(params, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


batch = {"tokens": jax.ShapeDtypeStruct((64, 128), jnp.int32), "label": jax.ShapeDtypeStruct((64,), jnp.int32)}
params = jax.eval_shape(model.init, jax.random.key(0), batch["tokens"])
state = (params, jax.eval_shape(optimizer.init, params))

# %% [markdown]
# ## Eight V100 in two nodes
#
# Two stages, each two-way data parallel and two-way tensor parallel.

# %%
cluster = hetjax.Cluster.parse("""
name = "eight-v100"
[[sites]]
name = "lab"
link = "infiniband-hdr"
[[sites.nodes]]
kind = "v100-16g"
devices = 4
count = 2
""")
options = {"num_stages": 2, "mesh": "2,2", "num_microbatches": 4}
rehearsal = hetjax.rehearse(train_step, cluster, state, batch, options=options)
notebook.shardings(rehearsal, stage=0)

# %% [markdown]
# ## Who decided that?
#
# Column, then row parallel: the two products of an MLP need one sum between them, not two.

# %%
up = next(path for path, _ in rehearsal.plan.state_specs if path.endswith("params/Dense_0/kernel"))
notebook.sharding(rehearsal, up)

# %% [markdown]
# ## What would it cost not to?
#
# One leaf replicated, with its two Adam moments, which follow it:

# %%
rehearsal.plan.with_(spec={up: None}).delta

# %% [markdown]
# ## What crosses between the stages
#
# The activation between them, at both ends: each device sends what its counterpart holds.

# %%
program = rehearsal.bundle.program
crossing = next(r for r in program.reshards if (r.source, r.target) == (0, 1))
notebook.sharding(rehearsal, f"%{crossing.ref}")
