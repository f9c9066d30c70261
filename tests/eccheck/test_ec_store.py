"""An agent's objects: states, fencing, room, memory that is given back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.eccheck.arena import ALIGN_BYTES, Arena
from hetjax.eccheck.layout import Layout
from hetjax.eccheck.pace import RateLimit
from hetjax.eccheck.sizes import parse_bytes, show_bytes
from hetjax.eccheck.store import COMMITTED, OPEN, PREPARED, Refused, Store
from hetjax.ir.errors import CheckpointError
from hetjax.kernels.erasure import block_sums


def _begin(store, oid, epoch=1, step=0, live=(), protect=(), size=100_000, name="x"):
    layout = Layout(1, 1, 4096, ((0, 0, size),), ("a:1", "b:2"))
    return store.begin(oid=oid, name=name, step=step, epoch=epoch, group=0, position=0, layout=layout,
                       live=set(live), protect=set(protect))


@pytest.mark.quick
def test_a_prepared_object_survives_the_next_start_until_the_verdict():
    """The coordinator died between two commits: elsewhere the object is committed, here it is not."""
    store = Store(Arena(1 << 20))
    _begin(store, "A")[0].state = PREPARED
    _begin(store, "open", name="y")
    store.fence(2)
    assert set(store.entries) == {"A"}, "what was still arriving is given up, what is prepared is not"
    _begin(store, "C", epoch=2, step=1, protect=["A"])
    assert store.get("A").state == COMMITTED
    _begin(store, "D", epoch=2, step=2)
    assert set(store.entries) == {"D"}


@pytest.mark.quick
def test_room_is_made_by_the_oldest_and_never_by_the_protected():
    store = Store(Arena(3 * 51 * 4096))
    for step, oid in enumerate("abc"):
        entry, evicted = _begin(store, oid, step=step, live="abc", size=200_000)
        entry.state = COMMITTED
        assert not evicted
    entry, evicted = _begin(store, "d", step=3, live="abc", protect="a", size=200_000)
    assert [e["oid"] for e in evicted] == ["b"] and store.evictions == 1
    entry.state = COMMITTED
    with pytest.raises(Refused, match="start the agent with more --memory") as error:
        _begin(store, "e", step=4, live="acd", protect="acd", size=200_000)
    assert error.value.code == "resource_exhausted"
    with pytest.raises(Refused, match="epoch 0 is stale"):
        _begin(store, "f", epoch=0)


@pytest.mark.quick
def test_a_stream_into_an_object_given_up_writes_nowhere():
    store = Store(Arena(1 << 20))
    entry, _ = _begin(store, "A")
    assert entry.state == OPEN
    data = np.full(4096, 7, np.uint8)
    store.write(entry, 0, 0, block_sums(data, 4096), data.data)
    store.drop("A")
    other, _ = _begin(store, "B")
    assert other.offset == entry.offset
    before = store.arena.bytes.copy()
    with pytest.raises(Refused, match="was given up"):
        store.write(entry, 0, 1, block_sums(data, 4096), data.data)
    assert np.array_equal(store.arena.bytes, before)


@pytest.mark.quick
def test_bytes_that_arrive_damaged_are_refused():
    store = Store(Arena(1 << 20))
    entry, _ = _begin(store, "A")
    data = np.arange(4096, dtype=np.uint32).view(np.uint8)[:4096].copy()
    sums = block_sums(data, 4096)
    data[9] ^= 1
    with pytest.raises(Refused, match="arrived damaged"):
        store.write(entry, 0, 0, sums, data.data)
    with pytest.raises(Refused, match="4097 bytes for 1 blocks"):
        store.write(entry, 0, 0, sums, memoryview(bytes(4097)))
    assert entry.missing_blocks() == sum(entry.used(j) for j in range(2))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60_000)), max_size=60), st.integers(0, 1 << 20))
@settings(max_examples=60, deadline=None)
def test_arena_gives_disjoint_regions_and_takes_all_back(moves, seed):
    arena, held = Arena(64 * ALIGN_BYTES), {}
    draw = np.random.default_rng(seed)
    for allocate, size in moves:
        if allocate or not held:
            offset = arena.allocate(size)
            if offset is None:
                assert arena.largest_free_bytes < size
                continue
            for other, length in held.items():
                assert offset + size <= other or other + length <= offset
            held[offset] = size
        else:
            offset = list(held)[int(draw.integers(len(held)))]
            arena.release(offset, held.pop(offset))
    for offset, size in held.items():
        arena.release(offset, size)
    assert arena.free_bytes == arena.largest_free_bytes == arena.capacity_bytes


@pytest.mark.quick
def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(CheckpointError, match="give the agent less"):
        Arena(1 << 50)


@pytest.mark.quick
def test_rate_limit_holds_back_what_exceeds_it(monkeypatch):
    from hetjax.eccheck import pace

    now, slept = [100.0], []
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pace.time, "sleep", lambda s: (slept.append(s), now.__setitem__(0, now[0] + s)))
    limit = RateLimit(1000.0)
    for _ in range(10):
        limit(500)
    assert sum(slept) == pytest.approx(10 * 500 / 1000 - 0.1, rel=0.01)
    RateLimit(0)(10**12)


@pytest.mark.quick
def test_sizes_as_people_write_them():
    for text, want in (("300", 300), ("1.5GB", 1.5e9), ("512MiB", 512 << 20), ("20MB/s", 20e6), ("2k", 2000)):
        assert parse_bytes(text) == want
    with pytest.raises(CheckpointError, match="is not a size"):
        parse_bytes("a lot")
    assert show_bytes(1536) == "1.5 KiB" and show_bytes(3 << 40) == "3.0 TiB"
