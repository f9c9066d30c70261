# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Two sites and a slow link: how much does the distance cost?
#
# A pipeline sends one activation forward and one gradient back per microbatch. Bandwidth is rarely the trouble; latency
# is, because a stage waits for an answer from far away. A schedule that keeps more microbatches under way hides it, as
# long as there is memory to hold them. This notebook needs numbers only: no model, no device.

# %%
from hetjax import notebook
from hetjax.passes.bounds import lower_bound
from hetjax.passes.schedules import PipelineCosts, schedule
from hetjax.passes.simulator import simulate
from hetjax.render.line_charts import Series, line_picture
from hetjax.render.units import human_seconds

# %% [markdown]
# ## Four stages, two here and two there
#
# Forward takes 1 ms, backward 2 ms, and the link between stages 1 and 2 takes 2 ms each way.


# %%
MS = 1e-3


def pipeline(latency, microbatches=24):
    return PipelineCosts((1 * MS,) * 4, (2 * MS,) * 4, microbatches, (0.0, latency * MS, 0.0))


def timeline(name, latency):
    costs = pipeline(latency)
    return simulate(schedule(name, costs), costs)


notebook.gantt(timeline("1f1b", 2), title="1F1B")

# %% [markdown]
# Every stage waits in the middle of the step. Virtual-1F1B counts the link as stages that hold microbatches but no
# device, and warms up with as many more:

# %%
notebook.gantt(timeline("virtual-1f1b", 2), title="Virtual-1F1B")

# %% [markdown]
# What that costs is memory: microbatches whose activations a device holds at once.

# %%
for name in ("1f1b", "virtual-1f1b"):
    print(f"{name:13} holds at most {timeline(name, 2).peak_in_flight} microbatches")

# %% [markdown]
# ## How far can the sites be apart?
#
# The step as the link grows slower, beside the bound that no order of the same work can beat.

# %%
latencies = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 8]
names = ("1f1b", "eager-1f1b", "virtual-1f1b")
series = [Series(name, [(x, timeline(name, x).makespan_s) for x in latencies]) for name in names]
series.append(Series("bound", [(x, lower_bound(pipeline(x)).lower_s) for x in latencies]))
assert series[2].points[-1][1] < series[0].points[-1][1]
line_picture(
    series, "a step as the link grows slower", "latency of the link, ms", "step", y_words=human_seconds, zero=False
)
