"""Placement and its formulas, by brute force."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.eccheck import sizing
from hetjax.eccheck.layout import (
    Layout,
    form_groups,
    pick_block_bytes,
    place,
    sent_bytes,
    sole_writer,
)
from hetjax.ir.errors import CheckpointError


def _layout(k, m, sizes, homes=None, block=4096):
    homes = range(len(sizes)) if homes is None else homes
    writers = tuple((w, h, s) for w, (h, s) in enumerate(zip(homes, sizes)))
    return Layout(k, m, block, writers, tuple(f"h{i}:1" for i in range(k + m)))


@pytest.mark.quick
@pytest.mark.parametrize("k,m", [(1, 1), (2, 1), (2, 2), (4, 2), (3, 4)])
def test_every_member_holds_one_chunk_of_each_stripe_and_parity_rotates(k, m):
    layout = _layout(k, m, [1 << 20] * (k + m))
    for stripe in range(layout.n):
        assert sorted(layout.role(p, stripe) for p in range(layout.n)) == list(range(layout.n))
        for role in range(layout.n):
            assert layout.role(layout.holder(role, stripe), stripe) == role
    for position in range(layout.n):
        assert len(layout.data_stripes(position)) == k


@given(
    k=st.integers(1, 5), m=st.integers(1, 3), data=st.data(),
    sizes=st.lists(st.integers(0, 300_000), min_size=1, max_size=8),
)
@settings(max_examples=80, deadline=None)
def test_every_byte_has_one_place_and_no_place_two_bytes(k, m, sizes, data):
    homes = [data.draw(st.integers(-1, k + m - 1)) for _ in sizes]
    layout = _layout(k, m, sizes, homes)
    placed, taken = place(layout), set()
    for writer, size in enumerate(sizes):
        next_block = 0
        for extent in placed.extents[writer]:
            assert extent.writer_block == next_block
            next_block += extent.num_blocks
            assert layout.role(extent.position, extent.stripe) < k
            for block in range(extent.chunk_block, extent.chunk_block + extent.num_blocks):
                place_ = (extent.position, extent.stripe, block)
                assert place_ not in taken
                taken.add(place_)
                assert block < placed.used_blocks[extent.position][extent.stripe]
        assert next_block == -(-size // layout.block_bytes)
    stored = sum(
        placed.used_blocks[p][j] for p in range(layout.n) for j in range(layout.n)
        if layout.role(p, j) < k
    )
    assert stored == len(taken)


@pytest.mark.quick
@pytest.mark.parametrize("k,m", [(2, 1), (2, 2), (4, 2), (8, 2)])
@pytest.mark.parametrize("sizes", ["even", "one", "uneven"])
def test_memory_is_n_over_k_of_the_state(k, m, sizes):
    n, total = k + m, 64 << 20
    each = {"even": [total // n] * n, "one": [total], "uneven": [total // 2, total // 3, total // 6]}[sizes]
    layout = _layout(k, m, each, block=pick_block_bytes(sum(each), k, m))
    held = layout.block_bytes * sum(map(sum, place(layout).used_blocks))
    assert held == pytest.approx(sum(each) * n / k, rel=0.05)
    fullest = layout.block_bytes * max(map(sum, place(layout).used_blocks))
    assert fullest == pytest.approx(sum(each) / k, rel=0.05)


@pytest.mark.quick
@pytest.mark.parametrize("k,m", [(2, 1), (2, 2), (4, 2), (6, 2)])
def test_bytes_sent_per_host_are_the_formula(k, m):
    n, each = k + m, (k * 1024) * 4096
    sent = sent_bytes(_layout(k, m, [each] * n))
    for member in range(n):
        assert sent[f"h{member}:1"] == each * (1 + (m - 1) / k)
        assert sent[f"w{member}"] == 0
    answer = sizing.size(each * n, n, k, m, link_bytes_s=1e9)
    assert answer.sent_bytes == pytest.approx(sent["h0:1"])
    assert answer.version_bytes == pytest.approx(each * n / k)


def test_a_single_writer_makes_the_parity_itself():
    layout = _layout(2, 2, [8 << 20])
    assert all(sole_writer(layout, j) == 0 for j in range(layout.n))
    sent = sent_bytes(layout)
    assert all(sent[a] == 0 for a in layout.members)
    # 3/4 of the data leave the host, and all parity but its own.
    assert sent["w0"] == pytest.approx((8 << 20) * (0.75 + 0.75), rel=0.02)


@pytest.mark.quick
def test_groups_spread_over_failure_domains():
    addresses = [f"h{i}:1" for i in range(8)]
    racks = {a: f"rack{i // 2}" for i, a in enumerate(addresses)}
    for _, m, members in form_groups(addresses, 2, 2, racks):
        assert m == 2
        assert len({racks[a] for a in members}) == 4
    assert [(k, m) for k, m, _ in form_groups(addresses[:7], 2, 1)] == [(3, 1), (2, 1)]
    assert [(k, m) for k, m, _ in form_groups(addresses[:2], 4, 2)] == [(1, 1)]
    assert [(k, m) for k, m, _ in form_groups(addresses[:1], 4, 2)] == [(1, 0)]
    with pytest.raises(CheckpointError, match="no checkpoint agent answers"):
        form_groups([], 2, 1)


@pytest.mark.quick
def test_layout_survives_json_and_refuses_nonsense():
    layout = _layout(2, 2, [5, 6, 7])
    assert Layout.from_json(layout.to_json()) == layout
    for field, value in (("k", 0), ("block_bytes", 100), ("members", ["a:1"]), ("writers", [[0, 9, 1]])):
        with pytest.raises(CheckpointError, match="impossible numbers"):
            Layout.from_json({**layout.to_json(), field: value})
    with pytest.raises(CheckpointError, match="not a chunk layout"):
        Layout.from_json({"k": 2})


def _brute(groups, lost):
    hosts, start = [], 0
    for members, m in groups:
        hosts.append((range(start, start + members), m))
        start += members
    return sum(
        all(len(set(chosen) & set(hs)) <= m for hs, m in hosts)
        for chosen in itertools.combinations(range(start), lost)
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    "groups", [[(3, 1)], [(4, 2)], [(6, 2)], [(4, 2)] * 2, [(2, 1)] * 4, [(4, 2), (5, 2)], [(8, 2)] * 2]
)
def test_survivable_subsets_by_brute_force(groups):
    for lost in range(sum(n for n, _ in groups) + 1):
        assert sizing.survivable_subsets(groups, lost) == _brute(groups, lost)


def test_published_recovery_values():
    def chance(group, hosts, lost):
        return sizing.survival_probability([group] * (hosts // group[0]), lost)

    assert chance((4, 2), 16, 3) == pytest.approx(0.971, abs=5e-4)
    assert chance((2, 1), 16, 2) == pytest.approx(0.933, abs=5e-4)  # two copies
    assert chance((8, 2), 64, 8) == pytest.approx(0.589, abs=5e-4)
    assert chance((8, 4), 16, 5) == pytest.approx(0.974, abs=5e-4)
    assert sizing.loss_probability([(4, 2)] * 4, 0.01) == pytest.approx(1.6e-5, rel=0.05)
    assert sizing.loss_probability([(2, 1)] * 8, 0.01) == pytest.approx(8.0e-4, rel=0.05)


def test_replayed_trace_agrees_with_the_closed_form():
    memory = sizing.SaveTier(interval_s=60, stall_s=0.1, complete_s=4, recovery_s=5)
    never = sizing.SaveTier(interval_s=1e9, stall_s=0, complete_s=0, recovery_s=0)
    disk = sizing.SaveTier(interval_s=1800, stall_s=0.1, complete_s=30, recovery_s=120)
    trace = dict(hosts=16, mtbf_s=3600, duration_s=3e7, seed=3)
    groups = [(4, 2)] * 4
    waste = sizing.replay_trace(groups=groups, disk=never, memory=memory, **trace)
    # A failure loses what came since the newest complete save: half an interval and the save itself.
    assert waste == pytest.approx(sizing.wasted_fraction(0.1, 60, 3600, 5 + 4), rel=0.05)
    assert sizing.best_interval_s(0.1, 3600) == pytest.approx(math.sqrt(2 * 0.1 * 3600))
    disk_only = sizing.replay_trace(groups=(), disk=disk, **trace)
    assert disk_only == pytest.approx(sizing.wasted_fraction(0.1, 1800, 3600, 120 + 30), rel=0.05)
    both = sizing.replay_trace(groups=groups, disk=disk, memory=memory, **trace)
    assert both == pytest.approx(waste + 0.1 / 1800, rel=1e-3)  # single losses are survived
    bursts = sizing.replay_trace(groups=groups, disk=disk, memory=memory, burst=0.5, **trace)
    assert waste < bursts < disk_only


def test_work_is_lost_back_to_the_newest_complete_save():
    tier = sizing.SaveTier(interval_s=10, stall_s=0, complete_s=3, recovery_s=0)
    assert [tier.lost_s(t) for t in (22.9, 23.0, 29.0, 32.0)] == pytest.approx([12.9, 3, 9, 12])


@pytest.mark.quick
def test_sizing_refuses_what_cannot_be():
    with pytest.raises(CheckpointError, match="use k <= 2"):
        sizing.size(1e9, 4, 4, 2, link_bytes_s=1e9)
    with pytest.raises(CheckpointError, match="above 0"):
        sizing.size(1e9, 4, 2, 0, link_bytes_s=1e9)
