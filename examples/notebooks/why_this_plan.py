# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why this plan?
#
# A plan is a list of decisions: where the model is cut, on which devices each stage runs, how parameters are split, how
# many microbatches there are and in what order they run. Each can be asked about, and changed by hand: the new plan is
# priced beside the old one, and nothing is searched behind your back. No device is touched and no array is made.

# %%
from collections import Counter

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import hetjax
from hetjax import notebook
from hetjax.demo.linen_gpt import GPT, train_step
from hetjax.demo.training import Config
from hetjax.render.line_charts import bars_picture
from hetjax.render.units import human_seconds

CLUSTER = """
name = "two-labs"
[links.wan]
between = ["lyon", "oslo"]
bandwidth_gbit_s = 10
latency_ms = 5
[[sites]]
name = "lyon"
[[sites.nodes]]
kind = "a100-40g"
devices = 4
[[sites]]
name = "oslo"
[[sites.nodes]]
kind = "v100-16g"
devices = 8
"""
BATCH = 96
config = Config(vocab_size=8192, length=512, width=768, num_heads=12, num_layers=6)
model, optimizer = GPT(config), optax.adamw(1e-3)


def create(key):
    params = model.init(key, jnp.zeros((1, config.length), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


state = jax.eval_shape(create, jax.random.key(0))
tokens = jax.ShapeDtypeStruct((BATCH, config.length), jnp.int32)
cluster = hetjax.Cluster.parse(CLUSTER)
rehearsal = hetjax.rehearse(
    train_step, cluster, state, {"tokens": tokens, "targets": tokens}, options={"num_microbatches": 6, "mesh": "4,1;4,2"}
)
plan = rehearsal.plan
notebook.stages(plan)

# %% [markdown]
# ## What was chosen, and what was asked for
#
# Six microbatches and the meshes were asked for; where the model is cut was chosen. So one may ask whether the wishes
# were wise: both stages wait for each other for half of the step and more.

# %%
notebook.gantt(plan)

# %% [markdown]
# ## Is the cut in the right place?
#
# Move it by a block, to either side.

# %%
earlier, later = (plan.with_(stage={1: {"first": f"GPT/block_{i}"}}) for i in (2, 4))
earlier.delta

# %% [markdown]
# ## Are six microbatches right?
#
# More of them fill the pipeline better; each crosses the link, and its latency, once more.

# %%
more = plan.with_(num_microbatches=12)
more.delta

# %% [markdown]
# ## The alternatives side by side
#
# Every bar is a plan that could be run as it is: `hetjax.parallelize(train_step, cluster=…, plan=…)`.

# %%
alternatives = {
    "the plan": plan,
    "cut before block_2": earlier,
    "cut before block_4": later,
    "3 microbatches": plan.with_(num_microbatches=3),
    "12 microbatches": more,
    "gpipe": plan.with_(schedule="gpipe"),
    "virtual-1f1b": plan.with_(schedule="virtual-1f1b"),
    "no tensor parallelism": plan.with_(stage={1: {"mesh": (8, 1)}}),
}
seconds = {name: p.costing.estimate.iteration_s for name, p in alternatives.items()}
bars_picture(list(seconds.items()), "predicted seconds of a step", human_seconds)

# %%
best = min(seconds, key=seconds.__getitem__)
print(f"fastest of these: {best}, {seconds['the plan'] / seconds[best] - 1:.0%} faster than the plan as asked for")

# %% [markdown]
# ## And if nothing were given?
#
# A search decides everything at once. It takes the model as layers with what each costs, here read off the traced step:
# coarser than the step's own program, so its seconds are not quite those above. It ends when the budget does or when
# nothing better can exist. What it looked at stays to be asked: open the tree for visits, prior, the best plan below
# every decision, and why one was not followed.

# %%
from hetjax.passes.search.costed import CostedTable, LayerCost
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.result import search
from hetjax.passes.search.space import Problem, pools_of

graph, flops, made, products = rehearsal.bundle.graph, Counter(), Counter(), Counter()
for op in graph.ops:
    if op.region == "forward" and "/" in op.block:
        module = op.block.split("/")[1]
        flops[module] += op.cost.flops / BATCH
        made[module] += sum(graph.avals[ref].nbytes for ref in op.outputs) / BATCH
        products[module] += op.primitive == "dot_general"
size = {module: sum(x.size for x in jax.tree.leaves(leaves)) for module, leaves in state.params.items()}
between = 4 * config.length * config.width
layers = [LayerCost(m, flops[m], 2 * made[m], size[m], made[m], 0.0, between, products=products[m]) for m in flops]
problem = Problem(CostedTable("GPT", layers, cluster, max_tensor=1), cluster, pools_of(cluster), BATCH, mixed=False)
found = search(OwnJudge(problem), max_evaluations=400)
notebook.search(found)
