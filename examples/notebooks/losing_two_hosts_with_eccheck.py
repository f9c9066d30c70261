# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Losing two hosts with ECCheck: is the checkpoint still there?
#
# Six hosts hold one checkpoint in their memory, coded 4 + 2. Each host is an agent: a process of its own, which we start,
# and two of which we kill with SIGKILL, as a power cut would. Then we restore.

# %%
import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HETJAX_JOB_TOKEN"] = "a secret of this notebook"

import jax
import numpy as np
import orbax.checkpoint as ocp

import hetjax.eccheck
from hetjax.render.line_charts import bars_picture
from hetjax.render.units import human_bytes

# %% [markdown]
# ## Six agents
#
# On a cluster each runs on a host of its own; here they share one machine and no memory.

# %%
folder = tempfile.mkdtemp(prefix="hj")
command = [sys.executable, "-m", "hetjax", "agent", "--listen", "127.0.0.1:0", "--versions", "2", "--job", "notebook"]
agents = []
for i in range(6):
    options = ["--socket", f"{folder}/s{i}", "--memory", "8MiB", "--scrub-interval", "0", "--json"]
    agents.append(subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, start_new_session=True))


def stop():
    """Ends the agents that still run, also when the notebook is closed half-way."""
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGTERM)
            agent.wait()


atexit.register(stop)
addresses = [json.loads(agent.stdout.readline())["address"] for agent in agents]
print(f"{len(addresses)} agents answer")

# %% [markdown]
# ## Save
#
# Orbax's own calls; only the registry of handlers is ECCheck's.

# %%
config = hetjax.eccheck.Config(
    agents=tuple(addresses), socket=f"{folder}/s0", job="notebook", token=os.environ["HETJAX_JOB_TOKEN"], k=4, m=2
)
rng = np.random.default_rng(0)
state = {"params": rng.normal(size=(512, 1024)).astype("float32"), "moments": rng.normal(size=(512, 1024)).astype("float32")}
nbytes = sum(x.nbytes for x in state.values())


def open_manager():
    registry = hetjax.eccheck.handler_registry(config)
    return ocp.CheckpointManager(f"{folder}/steps", handler_registry=registry)


start = time.perf_counter()
with open_manager() as manager:
    manager.save(7, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
saved_s = time.perf_counter() - start


def held():
    """Returns the bytes of checkpoints that each agent holds now, as `hetjax ckpt status` tells them; 0 for no answer."""
    status = [sys.executable, "-m", "hetjax", "ckpt", "status", "--json", "--job", "notebook", "--agents", ",".join(addresses)]
    told = json.loads(subprocess.run(status, stdout=subprocess.PIPE, text=True).stdout)["agents"]
    return [float(a["capacity_bytes"] - a["free_bytes"]) if "error" not in a else 0.0 for a in told]


held_before = held()
print(f"{human_bytes(nbytes)} saved in {saved_s:.2f} s; the step's directory holds a manifest and no arrays")

# %% [markdown]
# ## Kill two hosts, with what they hold

# %%
for agent in agents[1], agents[4]:
    os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
print("two agents are gone; four answer, and 4 + 2 needs four")

# %% [markdown]
# ## Restore, in a new manager

# %%
start = time.perf_counter()
with open_manager() as manager:
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    restored = manager.restore(7, args=ocp.args.StandardRestore(template))
restored_s = time.perf_counter() - start
same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored)))
assert same
print(f"restored in {restored_s:.2f} s, every bit the same")

# %% [markdown]
# ## What the safety costs
#
# Memory for 4 + 2 beside a second copy, which survives any one loss, and a third, which survives any two as the code does.

# %%
memory = [
    ("the state", float(nbytes)), ("4 + 2, any two losses", nbytes * 6 / 4),
    ("two copies, any one loss", 2.0 * nbytes), ("three copies, any two losses", 3.0 * nbytes),
]  # fmt: skip
bars_picture(memory, "memory of all hosts together", human_bytes)

# %% [markdown]
# ## The answer
#
# Still there: every agent held a quarter of the state, data or parity, and any four of them make the whole.

# %%
held_after = held()
assert sum(held_after) >= nbytes and held_after.count(0.0) == 2
bars = [
    (f"agent {i}" if after else f"agent {i}, killed with {human_bytes(before)}", after)
    for i, (before, after) in enumerate(zip(held_before, held_after))
]
bars_picture(bars, "what is left of the checkpoint", human_bytes, lines=[("a quarter of the state", nbytes / 4)])
