"""One of two processes of `_slamb_link.py`: trains an MLP with a dense and with a sparse exchange."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import time


def main(rank: int, out: str, rounds: int, width: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    # One machine each: a core of its own. Sharing all of them, each waits for the other's threads.
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    import jax

    jax.distributed.initialize("10.77.0.1:9876", num_processes=2, process_id=rank)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from hetjax import average_params, slamb
    from hetjax.optim.hlo_collectives import collectives_in

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"a": jax.random.normal(keys[0], (width, width)) * width**-0.5,
              "b": jax.random.normal(keys[1], (width, width)) * width**-0.5}
    x = jax.random.normal(jax.random.key(1 + rank), (16, width))

    def loss_of(p, x):
        return jnp.mean((jax.nn.relu(x @ p["a"]) @ p["b"] - x) ** 2)

    def is_float(a):
        return jnp.issubdtype(a.dtype, jnp.floating)

    def program(tx, dense: bool, shared: bool = True):
        """(payload bytes, a function that takes one step and waits for it)"""
        def step(params, state, x):
            local = jax.tree.map(lambda a: a[0], params)
            loss, grads = jax.value_and_grad(loss_of)(local, x)
            if dense:
                grads = average_params(grads, "data")
            state = jax.tree.map(lambda a: a[0] if is_float(a) else a, state)
            updates, state = tx.update(grads, state, local)
            new = optax.apply_updates(local, updates)
            # The loss, which a training loop reads, is summed in all programs: four bytes, by which
            # both processes wait for each other also where nothing else is exchanged.
            return (jax.tree.map(lambda a: a[None], new),
                    jax.tree.map(lambda a: a[None] if is_float(a) else a, state),
                    jax.lax.psum(loss, "data"))

        local_state = tx.init(params)
        specs = jax.tree.map(lambda a: P("data") if is_float(a) else P(), local_state)

        def put(a, spec):
            whole = np.asarray(a)[None] if spec == P("data") else np.asarray(a)
            return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), whole)

        stacked = jax.tree.map(lambda a: put(a, P("data")), params)
        state = jax.tree.map(put, local_state, specs)
        batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), np.asarray(x))
        param_specs = jax.tree.map(lambda a: P("data"), params)
        run = jax.jit(jax.shard_map(
            step, mesh=mesh, in_specs=(param_specs, specs, P("data")),
            out_specs=(param_specs, specs, P()), check_vma=shared))
        payload = sum(
            c.payload_bytes for c in collectives_in(run.lower(stacked, state, batch).as_text()))
        held = [stacked, state]

        def one_step():
            *held[:], loss = run(*held, batch)
            jax.block_until_ready((held, loss))

        return payload, one_step

    programs = {
        "dense": program(optax.lamb(1e-3), True),
        "dense, no exchange": program(optax.lamb(1e-3), False),
        "slamb": program(slamb(1e-3, "data"), False),
        # The same arithmetic as on one worker: what the step costs without the wire.
        "slamb, no exchange": program(slamb(1e-3, None), False, shared=False),  # each counts for itself
    }
    times = {name: [] for name in programs}
    for count in range(rounds + 2):
        # In turn, so that what else the machine does meets all of them alike.
        for name, (_, one_step) in programs.items():
            start = time.perf_counter()
            one_step()
            if count >= 2:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps({
            # The least disturbed of each, as timeit takes it; the median tells how disturbed it was.
            name: {"step_s": min(times[name]), "median_s": statistics.median(times[name]),
                   "payload_bytes": payload}
            for name, (payload, _) in programs.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
