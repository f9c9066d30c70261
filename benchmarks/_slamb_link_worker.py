"""One of two processes of `_slamb_link.py`: trains an MLP with a dense and with a sparse exchange."""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import time


def main(rank: int, out: str, steps: int, width: int) -> None:
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

    def loss(p, x):
        return jnp.mean((jax.nn.relu(x @ p["a"]) @ p["b"] - x) ** 2)

    def is_float(a):
        return jnp.issubdtype(a.dtype, jnp.floating)

    def step_of(tx, dense: bool, exchange: bool):
        def step(params, state, x):
            local = jax.tree.map(lambda a: a[0], params)
            grads = jax.grad(loss)(local, x)
            if dense and exchange:
                grads = average_params(grads, "data")
            state = jax.tree.map(lambda a: a[0] if is_float(a) else a, state)
            updates, state = tx.update(grads, state, local)
            new = optax.apply_updates(local, updates)
            return (jax.tree.map(lambda a: a[None], new),
                    jax.tree.map(lambda a: a[None] if is_float(a) else a, state))

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
            out_specs=(param_specs, specs), check_vma=exchange))
        lowered = run.lower(stacked, state, batch)
        payload = sum(c.payload_bytes for c in collectives_in(lowered.as_text()))
        for _ in range(3):
            stacked, state = run(stacked, state, batch)
        jax.block_until_ready(stacked)
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            stacked, state = run(stacked, state, batch)
            jax.block_until_ready(stacked)
            times.append(time.perf_counter() - start)
        return {"step_s": statistics.median(times), "payload_bytes": payload}

    figures = {
        "dense": step_of(optax.lamb(1e-3), True, True),
        "dense, no exchange": step_of(optax.lamb(1e-3), True, False),
        "slamb": step_of(slamb(1e-3, "data"), False, True),
        # The same arithmetic on one worker: what the step costs without the wire.
        "slamb, no exchange": step_of(slamb(1e-3, None), False, False),
    }
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(figures))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
