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
# priced beside the old one, and nothing is searched behind your back. No device is touched.

# %%
import optax

import hetjax
from hetjax import notebook
from hetjax.demo.linen_gpt import create, train_step
from hetjax.demo.session import CLUSTER
from hetjax.demo.training import Config
from hetjax.render.line_charts import bars_picture
from hetjax.render.units import human_seconds

config = Config(vocab_size=64, length=32, width=32, num_heads=2, num_layers=4)
state = create(config, optax.adamw(1e-3))
batch = {name: __import__("numpy").zeros((24, config.length), "int32") for name in ("tokens", "targets")}

rehearsal = hetjax.rehearse(train_step, CLUSTER, state, batch, options={"num_microbatches": 4, "mesh": "2,1;2,2"})
plan = rehearsal.plan
notebook.stages(plan)

# %% [markdown]
# ## Who holds what
#
# The largest leaves, with the part of each that a device of the second stage holds.

# %%
notebook.shardings(plan, stage=1)

# %% [markdown]
# ## Is the cut in the right place?
#
# Move one block to the other side and see.

# %%
earlier = plan.with_(stage={1: {"first": "GPT/block_1"}})
earlier.delta

# %% [markdown]
# ## Are four microbatches right?
#
# More microbatches fill the pipeline; each of them crosses the link, and its latency, once more.

# %%
plan.with_(num_microbatches=6).delta

# %% [markdown]
# ## The alternatives side by side
#
# Every bar is a plan that could be run as it is: `hetjax.parallelize(train_step, plan=…)`.

# %%
alternatives = {
    "the plan": plan,
    "cut before block_1": earlier,
    "cut before block_3": plan.with_(stage={1: {"first": "GPT/block_3"}}),
    "2 microbatches": plan.with_(num_microbatches=2),
    "6 microbatches": plan.with_(num_microbatches=6),
    "gpipe": plan.with_(schedule="gpipe"),
    "second stage 4 x 1": plan.with_(stage={1: {"mesh": (4, 1)}}),
    "no tensor parallelism": plan.with_(spec={path: None for path, _ in plan.state_specs}),
}
bars = [(name, p.costing.estimate.iteration_s) for name, p in alternatives.items()]
bars_picture(bars, "predicted seconds of a step", human_seconds, lines=[("no order beats", rehearsal.lower_bound_s)])
