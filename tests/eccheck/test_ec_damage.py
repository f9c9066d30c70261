"""Damage: found by checksum, treated as loss, repaired, and told where it is."""

import json
import pathlib
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from click.testing import CliRunner

from hetjax.cli.ckpt import ckpt
from hetjax.eccheck.client import Client
from hetjax.eccheck.mend import mend
from hetjax.eccheck.reader import ObjectReader, survey
from hetjax.eccheck.snapshot import take
from hetjax.eccheck.trees import restore_tree
from hetjax.eccheck.writer import Request, save_object
from hetjax.ir.errors import CheckpointError


def _saved(fleet, k=2, m=2):
    client = Client(fleet.config(k, m))
    state = {"w": np.random.default_rng(2).integers(0, 256, 900_001, np.uint8), "b": np.arange(9)}
    saved = save_object(client, take(state), Request("x", 3))
    return client, state, saved.oid


def _chunk(client, fleet, oid, role, stripe=0):
    """Returns (host, offset of the chunk in its memory, its stored bytes)."""
    layout = survey(client).found[0].manifest.layouts[0]
    host = fleet.hosts[layout.holder(role, stripe)]
    reply, _ = client.pool.peer(host.address).call("where", oid=oid, timeout_s=5)
    from hetjax.eccheck.layout import place

    used = place(layout).used_blocks[reply["position"]][stripe] * layout.block_bytes
    return host, reply["chunk_offsets"][stripe], used


def _restore(client):
    seen = survey(client)
    reader = ObjectReader(client, seen.found[0], seen.silent)
    return restore_tree(reader, None, None), reader


def _cli(client, *arguments):
    result = CliRunner().invoke(
        ckpt, [*arguments, "--json", "--agents", ",".join(client.config.agents), "--job", "test"],
        standalone_mode=False,
    )
    assert result.exception is None, result.exception
    return result.return_value, json.loads(result.output)


@pytest.mark.parametrize("what", ["data", "parity", "tail"])
def test_a_damaged_chunk_is_found_told_and_repaired(fleet, damage, what):
    fleet.start(4)
    client, state, oid = _saved(fleet)
    role = {"data": 1, "parity": 2, "tail": 0}[what]
    host, start, used = _chunk(client, fleet, oid, role)
    memory = damage(host)
    if what == "tail":
        memory[start + used // 2 : start + used] = 0  # as if cut short
    else:
        memory[start + used // 3] ^= 0x10
    for home in (0, None):  # with the host's own memory, and all over the network
        other = Client(fleet.config(2, 2, home=home))
        tree, reader = _restore(other)
        assert tree["w"].tobytes() == state["w"].tobytes() and np.array_equal(tree["b"], state["b"])
        other.close()
    assert (reader.rebuilt_bytes > 0) == (what != "parity")  # parity is not fetched where data are good
    code, report = _cli(client, "scrub")
    assert code == 1 and {(d["agent"], d["stripe"], d["role"]) for d in report["damaged"]} == {
        (host.address, 0, role)}
    code, report = _cli(client, "verify")
    assert code == 1 and any(host.address in p and "damaged" in p for p in report["steps"][0]["problems"])
    code, report = _cli(client, "ls")
    assert code == 0 and report["steps"][0]["damaged_blocks"] >= 1
    code, report = _cli(client, "repair")
    assert code == 0 and [r["agent"] for r in report["repaired"]] == [host.address]
    assert _cli(client, "scrub")[0] == 0 and _cli(client, "verify")[0] == 0
    client.close()


def test_m_damaged_chunks_are_rebuilt_and_one_more_is_an_error(fleet, damage):
    fleet.start(4)
    client, state, oid = _saved(fleet)
    for role in (0, 2):
        host, start, _ = _chunk(client, fleet, oid, role)
        damage(host)[start + 5] ^= 1
    tree, _ = _restore(client)
    assert tree["w"].tobytes() == state["w"].tobytes()
    host, start, _ = _chunk(client, fleet, oid, 1)
    damage(host)[start + 5] ^= 1
    with pytest.raises(CheckpointError, match="stripe 0 has 1 of the 2 chunks it needs") as error:
        _restore(client)
    assert "damaged" in str(error.value) and host.address in str(error.value)
    code, report = _cli(client, "repair")
    assert code == 1 and report["failed"]
    client.close()


def test_damage_and_loss_together(fleet, damage):
    fleet.start(6)
    client, state, oid = _saved(fleet, 4, 2)
    host, start, _ = _chunk(client, fleet, oid, 3, stripe=2)
    damage(host)[start + 77] ^= 0x80
    fleet.kill(next(h for h in fleet.hosts if h is not host))
    tree, _ = _restore(client)
    assert tree["w"].tobytes() == state["w"].tobytes()
    client.close()


def test_background_scrub_heals_by_itself(fleet, damage):
    fleet.start(3, extra=("--scrub-interval", "0.2"))
    client, _, oid = _saved(fleet, 2, 1)
    host, start, _ = _chunk(client, fleet, oid, 0)
    memory = damage(host)
    good = memory[start : start + 4096].copy()
    memory[start + 9] ^= 1
    # The agent's own clock drives the scrub; each look is a call that waits for an answer.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not np.array_equal(memory[start : start + 4096], good):
        client.pool.peer(host.address).call("status", timeout_s=5)
    assert np.array_equal(memory[start : start + 4096], good)
    client.close()


def test_drained_files_survive_the_loss_of_m_and_a_cut(fleet, tmp_path):
    fleet.start(4)
    client, state, _ = _saved(fleet)
    code, report = _cli(client, "drain", "--to", str(tmp_path / "d"))
    assert code == 0 and all(a["steps"] == {"x": 3} for a in report["agents"])
    for host in fleet.hosts:
        fleet.kill(host)
    files = sorted(pathlib.Path(tmp_path / "d").rglob("*.chunks"))
    assert len(files) == 4
    files[0].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-1])  # cut short
    seen = survey(client, str(tmp_path / "d"))
    assert seen.found[0].step == 3 and seen.found[0].margin() == 0
    tree = restore_tree(ObjectReader(client, seen.found[0], seen.silent), None, None)
    assert tree["w"].tobytes() == state["w"].tobytes()
    data = bytearray(files[1].read_bytes())
    data[-100] ^= 1
    files[1].write_bytes(bytes(data))
    seen = survey(client, str(tmp_path / "d"))
    with pytest.raises(CheckpointError, match="chunks it needs"):
        restore_tree(ObjectReader(client, seen.found[0], seen.silent), None, None)
    client.close()


def test_agents_killed_in_the_middle_of_a_restore_cost_nothing(fleet):
    fleet.start(4, memory="24MiB")
    own = Client(fleet.config(2, 2))
    state = {f"w{i}": np.random.default_rng(i).integers(0, 256, 8 << 20, np.uint8) for i in range(5)}
    save_object(own, take(state), Request("x", 1))
    for doomed in ((1, 2), (0, 3)):  # (0: the own host's, whose memory is mapped)
        seen = survey(own)
        reader = ObjectReader(own, seen.found[0], seen.silent)
        with ThreadPoolExecutor(1) as threads:
            restored = threads.submit(restore_tree, reader, None, None)
            while reader.read_bytes < 8 << 20 and not restored.done():
                pass
            for number in doomed:
                fleet.kill(fleet.hosts[number])
            tree = restored.result()
        assert all(np.array_equal(tree[name], leaf) for name, leaf in state.items())
        for number in doomed:
            fleet.restart(fleet.hosts[number])
        assert not mend(Client(fleet.config(2, 2)))["failed"]
    own.close()


def test_a_restore_whose_memory_is_given_to_the_next_save_is_right_or_an_error(fleet):
    fleet.start(4, memory="5MiB", versions=2)
    writer, own = Client(fleet.config(2, 2)), Client(fleet.config(2, 2))
    outcomes = {"right": 0, "error": 0}

    def save(steps):
        live = []
        for step in steps:
            saved = save_object(
                writer, take({"w": np.full(8 << 20, step, np.uint8)}), Request("x", step, live=live, protect=live[-1:]))
            live = [*live[-1:], saved.oid]

    save([0])
    with ThreadPoolExecutor(1) as threads:
        saves = threads.submit(save, range(1, 25))
        while not saves.done():
            try:
                found = survey(own).found[-1]  # the older one: its place is the next save's
                tree = restore_tree(ObjectReader(own, found), None, None)
            except (CheckpointError, IndexError):
                outcomes["error"] += 1
            else:
                assert (tree["w"] == found.step).all()
                outcomes["right"] += 1
        saves.result()
    assert outcomes["right"] >= 3 and outcomes["error"] >= 1, outcomes
    for each in (writer, own):
        each.close()
