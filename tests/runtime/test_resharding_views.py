"""Pieces through a transport: views of host buffers, in chunks, within a budget, checked when asked."""

import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.errors import RuntimeFault
from hetjax.ir.program import StageMesh
from hetjax.passes.reshard_plan import plan_reshard
from hetjax.passes.reshard_plan.cases import cluster_of
from hetjax.runtime.piece_views import InProcess, PieceView, carry

CLUSTER = cluster_of(3, 4)
DTYPES = [np.float32, np.bool_, np.uint32, ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e5m2]


class Late:
    """Delivers copies from another thread, last first, and remembers the most that was under way."""

    def __init__(self):
        self.waiting, self.most, self.under_way = [], 0, 0
        self.lock, self.some, self.over = threading.Lock(), threading.Semaphore(0), False
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def send(self, view, arrived):
        with self.lock:
            self.under_way += view.nbytes
            self.most = max(self.most, self.under_way)
            self.waiting.append((view, arrived))
        self.some.release()

    def work(self):
        while True:
            self.some.acquire()
            with self.lock:
                if self.over:
                    return
                view, arrived = self.waiting.pop()
                self.under_way -= view.nbytes
            arrived(PieceView(view.name, view.source, view.target, view.start, view.stop, view.data.copy(), view.checksum))

    def close(self):
        self.over = True
        self.some.release()
        self.thread.join()


def ends(source, source_spec, target, target_spec, value):
    """Returns what sources hold and what targets shall."""
    held = {
        d: (block, value[(*map(slice, *block), ...)].copy())
        for d, block in source.blocks(source_spec, value.shape).items()
    }
    return held, target.blocks(target_spec, value.shape)


def mesh(name, devices, axes):
    return StageMesh(name, "v100-16g", "room", axes, tuple(devices))


@st.composite
def transfers(draw):
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 5, 8, 64, 100]), max_size=3)))
    sides = []
    for name, pool in (("s0", range(4)), ("s1", draw(st.sampled_from([range(4, 12), range(12)])))):
        size = draw(st.sampled_from([1, 2, 3, 4]))
        at = draw(st.permutations(list(pool)))[:size]
        first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        where = draw(st.lists(st.integers(-1, max(-1, len(shape) - 1)), min_size=2, max_size=2))
        spec = tuple(tuple(a for a, d in zip("xy", where) if d == k) for k in range(len(shape)))
        sides += [mesh(name, at, (("x", first), ("y", size // first))), spec]
    return (*sides, shape, draw(st.sampled_from(DTYPES)))


@given(transfers())
@settings(max_examples=150, deadline=None)
def test_uneven_blocks_arrive_through_a_transport(transfer):
    source, source_spec, target, target_spec, shape, dtype = transfer
    value = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    plan = plan_reshard(CLUSTER, source, source_spec, target, target_spec, shape, value.itemsize)
    held, due = ends(source, source_spec, target, target_spec, value)
    there = carry("x", plan.pieces, held, due, InProcess(), budget_bytes=256, check=True, timeout_s=60)
    for d, block in due.items():
        assert there[d].dtype == dtype
        np.testing.assert_array_equal(there[d], value[(*map(slice, *block), ...)])


def large():
    source, target = mesh("s0", range(4), (("x", 4),)), mesh("s1", range(4, 12), (("x", 8),))
    value = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    plan = plan_reshard(CLUSTER, source, (("x",), ()), target, ((), ()), value.shape, 4)
    return plan, value, *ends(source, (("x",), ()), target, ((), ()), value)


def test_a_slow_transport_stays_within_the_budget():
    plan, value, held, due = large()
    late = Late()
    try:
        there = carry("x", plan.pieces, held, due, late, budget_bytes=1 << 18, timeout_s=120)
    finally:
        late.close()
    assert all((there[d] == value).all() for d in due)
    assert 0 < late.most <= 1 << 18


def test_a_damaged_chunk_is_named():
    class Damaging:
        def send(self, view, arrived):
            data = view.data.copy()
            if view.start[0] >= 512:
                data.flat[0] += 1
            arrived(PieceView(view.name, view.source, view.target, view.start, view.stop, data, view.checksum))

    plan, _, held, due = large()
    with pytest.raises(RuntimeFault, match=r"x7:s0>s1: the chunk \(\d+, 0\) to .* from device \d+ to \d+ arrived damaged"):
        carry("x7:s0>s1", plan.pieces, held, due, Damaging(), check=True, timeout_s=60)


def test_a_failing_or_silent_transport_ends_the_transfer():
    class Broken:
        def send(self, view, arrived):
            raise ConnectionError("the peer hung up")

    class Silent:
        def send(self, view, arrived):
            pass

    plan, _, held, due = large()
    with pytest.raises(RuntimeFault, match=r"failed from device 0 to .*the peer hung up"):
        carry("x", plan.pieces, held, due, Broken(), timeout_s=60)
    with pytest.raises(RuntimeFault, match=r"chunks had not arrived after 0.01 s"):
        carry("x", plan.pieces, held, due, Silent(), timeout_s=0.01)


def test_views_share_the_senders_memory():
    seen = []

    class Looking(InProcess):
        def send(self, view, arrived):
            seen.append(view)
            super().send(view, arrived)

    plan, _, held, due = large()
    carry("x", plan.pieces, held, due, Looking(), timeout_s=60)
    first = [v for v in seen if v.source in held]
    assert first and all(np.shares_memory(v.data, held[v.source][1]) for v in first)
