"""Bulk transfers beside gRPC: the same bytes, in place, and nobody trusted."""

import socket
import struct
import time

import numpy as np
import pytest

from hetjax.eccheck import bulk
from hetjax.eccheck.client import Client
from hetjax.eccheck.layout import place
from hetjax.eccheck.reader import ObjectReader, survey
from hetjax.eccheck.snapshot import take
from hetjax.eccheck.trees import restore_tree
from hetjax.eccheck.wire import AgentError
from hetjax.eccheck.writer import Request, save_object
from hetjax.kernels.erasure import block_sums

STATE = {"x": np.arange(70_000, dtype=np.float32), "y": np.arange(999, dtype=np.uint8)}


@pytest.fixture
def one(fleet):
    """A client with three agents, an object of STATE, and where a remote position's chunks are."""
    fleet.start(3)
    client = Client(fleet.config(2, 1))
    save_object(client, take(STATE), Request("x", 1))
    found = survey(client).found[0]
    layout = found.manifest.layouts[0]
    position, address = next((p, a) for (_, p), a in found.holders.items() if a != fleet.hosts[0].address)
    used = place(layout).used_blocks[position]
    runs = [(stripe, 0, n) for stripe, n in enumerate(used) if n]
    yield client, found, layout, client.pool.peer(address), runs
    client.close()


def port_of(peer):
    return peer.call("hello", timeout_s=5)[0]["bulk_port"]


def dial(peer, job="test", token="", timeout_s=5.0):
    host = peer.address.rpartition(":")[0]
    return bulk.connect(host, port_of(peer), job, token, connect_s=2.0, timeout_s=timeout_s)


def read(peer, oid, runs, size, land=None):
    return [(s, b, bytes(data), landed) for s, b, data, landed in
            peer.read_blocks(oid, runs, size, timeout_s=5, land=land)]


def test_both_transports_carry_the_same_bytes(one):
    client, found, layout, peer, runs = one
    by_socket = read(peer, found.oid, runs, layout.block_bytes)
    assert peer._bulk_port > 0
    peer._bulk_port = 0
    assert read(peer, found.oid, runs, layout.block_bytes) == by_socket
    for address in client.config.agents:
        client.pool.peer(address)._bulk_port = 0
    save_object(client, take(STATE), Request("x", 2, live=[found.oid]))
    for address in client.config.agents:
        client.pool.peer(address)._bulk_port = -1
    for step in (1, 2):
        step_found = next(f for f in survey(client).found if f.step == step)
        back = restore_tree(ObjectReader(client, step_found), None, None)
        assert all(np.array_equal(back[k], STATE[k]) for k in STATE)


def test_pieces_are_received_where_they_are_wanted(one):
    _, found, layout, peer, runs = one
    expected = read(peer, found.oid, runs, layout.block_bytes)
    places = {}

    def land(stripe, block, num_bytes):
        if stripe == runs[0][0]:
            return places.setdefault((stripe, block), np.zeros(num_bytes, np.uint8))
        return None

    got = read(peer, found.oid, runs, layout.block_bytes, land)
    assert [g[:3] for g in got] == [e[:3] for e in expected]
    assert {g[0] for g in got if g[3]} == {runs[0][0]}
    assert all(bytes(places[s, b]) == data for s, b, data, landed in got if landed)


def test_a_port_that_moved_is_asked_for_again_and_one_that_is_shut_is_done_without(one, monkeypatch):
    _, found, layout, peer, runs = one
    expected = [e[:3] for e in read(peer, found.oid, runs, layout.block_bytes)]
    with socket.create_server(("127.0.0.1", 0)) as gone:
        shut = gone.getsockname()[1]
    peer._bulk_port = shut  # as of an agent that was replaced
    assert [e[:3] for e in read(peer, found.oid, runs, layout.block_bytes)] == expected
    assert peer._bulk_port == port_of(peer)
    real = peer.call
    monkeypatch.setattr(peer, "call", lambda op, **kw: (
        ({"bulk_port": shut}, b"") if op == "hello" else real(op, **kw)))  # a firewall
    peer._bulk_port = -1
    assert [e[:3] for e in read(peer, found.oid, runs, layout.block_bytes)] == expected
    assert peer._bulk_port == 0


@pytest.mark.parametrize("job,token,words", [
    ("test", "guess", "job token is not"), ("other", "", "serves job 'test', not 'other'")])
def test_strangers_are_refused(one, job, token, words):
    _, found, layout, peer, runs = one
    with pytest.raises(AgentError, match=words):
        list(bulk.read_blocks(dial(peer, job, token), peer.address, found.oid, runs,
                              layout.block_bytes, timeout_s=5))


def test_requests_that_do_not_fit_are_refused_by_name(one):
    _, found, layout, peer, runs = one

    def ask(**request):
        line = dial(peer)
        line.send_frame({"timeout_s": 5, **request})
        reply = line.frame()
        line.socket.close()
        return reply

    assert "no bulk operation 'erase'" in ask(op="erase")["detail"]
    assert "is not here" in ask(op="read", oid="none", runs=[])["detail"]
    assert "blocks 0..99999 of stripe 0" in ask(op="read", oid=found.oid, runs=[[0, 0, 99999]])["detail"]
    assert "is committed, not open" in ask(op="put", oid=found.oid)["detail"]
    assert ask(op="read", oid=found.oid)["error"] == "invalid_argument"
    line = bulk.Line(socket.create_connection(("127.0.0.1", port_of(peer))), 5)
    line.send(struct.pack("<I", 1 << 30))  # a greeting of a gigabyte
    assert "above 4096" in line.frame()["detail"]
    line.socket.close()
    line = dial(peer)
    line.send(struct.pack("<I", 2) + b"[]")
    assert "not a JSON object" in line.frame()["detail"]
    line.socket.close()


def begin(peer, layout, oid):
    peer.call("begin", oid=oid, name="y", step=9, epoch=1, group=0, position=0, live=[], protect=[],
              layout=layout.to_json(), timeout_s=5)


def test_damaged_and_misplaced_pieces_are_refused(one):
    _, _, layout, peer, _ = one
    begin(peer, layout, "open")
    size = layout.block_bytes
    data = np.ones(size, np.uint8)
    good = block_sums(data, size)
    stripe = next(j for j, n in enumerate(place(layout).used_blocks[0]) if n)
    for piece, words in (((stripe, 0, good + np.uint64(1), data), "arrived damaged"),
                         ((stripe, 10**6, good, data), "are not in object"),
                         ((stripe, 0, good, data[: size - 1].repeat(2)), "bytes for 1 blocks")):
        with pytest.raises(AgentError, match=words):
            # More than the sockets hold, so that the refusal comes in the middle of sending.
            peer.put_blocks("open", [piece, *[(stripe, 0, good, data)] * 4000], timeout_s=5)
    peer.put_blocks("open", [(stripe, 0, good, data)], timeout_s=5)
    peer.call("abort", oid="open", timeout_s=5)


def test_memory_is_given_up_under_a_stream_that_stalls(one):
    _, _, layout, peer, _ = one
    begin(peer, layout, "stalled")
    size = layout.block_bytes
    stripe = next(j for j, n in enumerate(place(layout).used_blocks[0]) if n)
    line = dial(peer)
    line.send_frame({"op": "put", "oid": "stalled", "timeout_s": 30})
    assert line.frame() == {}
    line.send(struct.pack("<IIIQ", stripe, 0, 1, size), bytes(8), bytes(size // 2))
    started = time.monotonic()
    peer.call("abort", oid="stalled", timeout_s=5)  # does not wait for the stream
    assert time.monotonic() - started < 2.0
    line.send(bytes(size // 2))
    assert "given up" in line.frame()["detail"]
    line.socket.close()


def test_a_transfer_ends_at_its_deadline_on_both_sides(one):
    _, found, _, peer, _ = one
    line = dial(peer)
    line.send_frame({"op": "read", "oid": found.oid, "timeout_s": 0.3})  # runs are missing: a refusal
    assert line.frame()["error"] == "invalid_argument"
    line.socket.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and says nothing
        mute = bulk.connect("127.0.0.1", silent.getsockname()[1], "test", "", connect_s=2, timeout_s=0.3)
        started = time.monotonic()
        with pytest.raises(AgentError, match="no answer within the deadline"):
            list(bulk.read_blocks(mute, "a:1", "x", [(0, 0, 1)], 4096, timeout_s=0.3))
        assert time.monotonic() - started < 3.0
