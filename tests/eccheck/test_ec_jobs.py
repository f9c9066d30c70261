"""Several processes, foreign and stale jobs, TLS, limits, traffic, the command line, draining."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner

from hetjax.cli.ckpt import ckpt
from hetjax.eccheck import Config, ECCheckpointManager, client, handler_registry, load_config
from hetjax.eccheck.client import Client, attach
from hetjax.eccheck.config import Tls
from hetjax.eccheck.layout import sent_bytes
from hetjax.eccheck.reader import ObjectReader, survey
from hetjax.eccheck.snapshot import take
from hetjax.eccheck.trees import restore_tree
from hetjax.eccheck.wire import AgentError, pack, unpack
from hetjax.eccheck.writer import Request, save_object
from hetjax.ir.errors import CheckpointError

MANY = """
import sys
number, port, directory, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
import dataclasses
config = dataclasses.replace(config, socket=sys.argv[5].split(",")[number])
jax.distributed.initialize(f"127.0.0.1:{port}", int(sys.argv[6]), number)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import orbax.checkpoint as ocp
from hetjax.eccheck import handler_registry, ECCheckpointManager
g = np.arange(4096 * 8, dtype=np.float32).reshape(4096, 8)
flat, grid = Mesh(np.array(jax.devices()), ("d",)), Mesh(np.array(jax.devices()).reshape(2, -1), ("a", "b"))
x = jax.make_array_from_callback(g.shape, NamedSharding(flat, P("d")), lambda i: g[i])
r = jax.make_array_from_callback((5,), NamedSharding(flat, P()), lambda i: np.arange(5.0)[i])
options = ocp.CheckpointManagerOptions(max_to_keep=1)
if mode == "handler":
    m = ocp.CheckpointManager(directory, options=options, handler_registry=handler_registry(config))
else:
    m = ECCheckpointManager(directory, ocp.CheckpointManagerOptions(save_interval_steps=1000), config=config)
    m.save(0, args=ocp.args.StandardSave({"x": x, "r": r, "n": np.arange(3)}))
for s in (1, 2):
    m.save(s, args=ocp.args.StandardSave({"x": x * s, "r": r, "n": np.arange(3) + s}))
m.wait_until_finished()
assert m.latest_step() == 2
target = {"x": jax.ShapeDtypeStruct(g.shape, np.float32, sharding=NamedSharding(grid, P("b", "a"))), "n": np.arange(3)}
y = m.restore(2, args=ocp.args.StandardRestore(target))
assert all(np.array_equal(np.asarray(s.data), 2 * g[s.index]) for s in y["x"].addressable_shards)
assert np.array_equal(y["n"], np.arange(3) + 2)
m.close()
print("GOOD", number)
"""


@pytest.mark.parametrize("mode", ["handler", "manager"])
def test_one_job_of_two_processes_restored_by_one(
    fleet, run_trainer, trainer_head, free_port, tmp_path, mode
):
    fleet.start(3)
    config, port = fleet.config(2, 1, rpc_timeout_s=20.0), free_port()
    sockets = ",".join(h.socket for h in fleet.hosts[:2])
    processes = [
        run_trainer(trainer_head + MANY, i, port, tmp_path / "ck", mode, sockets, 2, config=config,
                    wait=False, devices=2)
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert all(p.returncode == 0 for p in processes), "\n".join(o[-3000:] for o in outputs)
    fleet.kill(fleet.hosts[1])
    reader_config = fleet.config(2, 1, home=None)
    target = {"x": jnp.zeros((4096, 8)), "r": jnp.zeros(5)}
    if mode == "handler":
        manager = ocp.CheckpointManager(tmp_path / "ck", handler_registry=handler_registry(reader_config))
    else:
        manager = ECCheckpointManager(tmp_path / "ck", config=reader_config)
    got = manager.restore(2, args=ocp.args.StandardRestore(target))
    manager.close()
    assert np.array_equal(got["x"], 2 * np.arange(4096 * 8, dtype=np.float32).reshape(4096, 8))
    assert np.array_equal(got["r"], np.arange(5.0))
    found = survey(Client(reader_config)).found[0]
    sizes = [b for lay in found.manifest.layouts for _, _, b in lay.writers]
    assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes), "both hosts keep their own half"


LOSE_ALL = """
import sys, dataclasses, signal, warnings, pathlib
number, port, directory, sockets, pids = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4].split(","), sys.argv[5]
config = dataclasses.replace(config, socket=sockets[number])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import orbax.checkpoint as ocp
from hetjax.eccheck import handler_registry
from hetjax.eccheck.tier import tier_of
g = np.arange(4096 * 8, dtype=np.float32).reshape(4096, 8)
flat = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
x = jax.make_array_from_callback(g.shape, flat, lambda i: g[i])
m = ocp.CheckpointManager(directory, handler_registry=handler_registry(config))
def save(s):
    m.save(s, args=ocp.args.StandardSave({"x": x * s, "n": np.arange(3) + s}))
    m.wait_until_finished()
save(1)
multihost_utils.sync_global_devices("saved")
if number == 0:
    for pid in pids.split(","):
        os.killpg(int(pid), signal.SIGKILL)
multihost_utils.sync_global_devices("killed")
save(2)                     # the agents are gone and nobody knows it yet
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    tier_of(config).tell()
    save(3)                 # now the first process knows
assert any("step 2 of" in str(w.message) and "written to disk only" in str(w.message) for w in told), told
assert list(m.all_steps()) == [1, 2, 3]
for s in (3, 2):
    y = m.restore(s, args=ocp.args.StandardRestore({"x": x, "n": np.arange(3)}))
    assert all(np.array_equal(np.asarray(p.data), s * g[p.index]) for p in y["x"].addressable_shards)
    assert np.array_equal(y["n"], np.arange(3) + s)
m.close()
print("GOOD", number)
"""


def test_a_job_of_two_processes_goes_to_disk_together_when_its_agents_are_gone(
    fleet, run_trainer, trainer_head, free_port, tmp_path
):
    fleet.start(3)
    config, port, steps = fleet.config(2, 1), free_port(), tmp_path / "ck"
    sockets, pids = ",".join(h.socket for h in fleet.hosts[:2]), ",".join(str(h.process.pid) for h in fleet.hosts)
    processes = [
        run_trainer(trainer_head + LOSE_ALL, i, port, steps, sockets, pids, config=config, wait=False, devices=2)
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert all(p.returncode == 0 for p in processes), "\n".join(o[-3000:] for o in outputs)
    for host in fleet.hosts:
        host.process.wait()
        host.process.stdout.close()
    # One process with other devices reads what two wrote, also a part of it; a damaged byte is named.
    want = {"x": jnp.zeros((4096, 8))}
    with ocp.CheckpointManager(steps, handler_registry=handler_registry(fleet.config(2, 1, home=None, rpc_timeout_s=0.5))) as manager:
        got = manager.restore(2, args=ocp.args.StandardRestore({**want, "n": np.zeros(3, int)}))
        assert np.array_equal(got["x"], 2 * np.arange(4096 * 8, dtype=np.float32).reshape(4096, 8))
        assert np.array_equal(got["n"], np.arange(3) + 2)
        assert manager.item_metadata(2) is not None
        part = next((steps / "2").rglob("hetjax_eccheck.w1.bytes"))
        data = bytearray(part.read_bytes())
        data[1000] ^= 1
        part.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"w1\.bytes: bytes 0 to \d+ are damaged"):
            manager.restore(2, args=ocp.args.StandardRestore({**want, "n": np.zeros(3, int)}))


def test_independent_runtimes_share_one_state(fleet):
    """Two processes that are no jax.distributed job save one logical state together."""
    from concurrent.futures import ThreadPoolExecutor

    fleet.start(3)
    parts = [{"stage0": np.arange(3000), "both": np.ones(5)}, {"stage1": np.arange(500) * 2.0, "both": np.ones(5)}]

    def save(number):
        own = Client(fleet.config(2, 1, home=number))
        snapshot = take(parts[number], writer=number, count=2, shared=False)
        return save_object(own, snapshot, Request("x", 1, writer=number, count=2, run="r1"))

    with ThreadPoolExecutor(2) as threads:
        saved = list(threads.map(save, range(2)))
    assert saved[0].oid == saved[1].oid
    fleet.kill(fleet.hosts[0])
    fresh = Client(fleet.config(2, 1, home=None))
    seen = survey(fresh)
    tree = restore_tree(ObjectReader(fresh, seen.found[0], seen.silent), None, None)
    for part in parts:
        for name, want in part.items():
            assert np.array_equal(tree[name], want)


def test_a_process_that_never_comes_is_an_error_in_time(fleet):
    fleet.start(3)
    own = Client(fleet.config(2, 1, rpc_timeout_s=0.5))
    with pytest.raises(CheckpointError, match="0 of 1 processes of the save answered within"):
        save_object(own, take({"x": np.ones(3)}), Request("x", 1, writer=0, count=2, run="r1"))
    assert not survey(own).found
    own.close()


@pytest.mark.parametrize("k,m", [(2, 1), (2, 2)])
def test_bytes_sent_and_memory_are_the_formulas(fleet, k, m):
    """Every host with a state of its own, then a single host with all of it: counted, not derived."""
    from concurrent.futures import ThreadPoolExecutor

    n, each = k + m, 3 << 20
    fleet.start(n, memory="16MiB")
    states = [{f"w{i}": np.random.default_rng(i).integers(0, 256, each, np.uint8)} for i in range(n)]
    clients = [Client(fleet.config(k, m, home=i)) for i in range(n)]

    def save(number):
        snapshot = take(states[number], writer=number, count=n, shared=False)
        return save_object(clients[number], snapshot, Request("even", 1, writer=number, count=n, run="r"))

    with ThreadPoolExecutor(n) as threads:
        list(threads.map(save, range(n)))
    found = survey(clients[0]).found[0]
    layout = found.manifest.layouts[0]
    want = sent_bytes(layout)
    for host, own in zip(fleet.hosts, clients):
        status, _ = own.pool.peer(host.address).call("status", timeout_s=5)
        # What an agent sent: its data chunks to the encoders, counted by it, and what it pushed.
        assert status["counters"]["sent"] == want[host.address]
        assert own.sent_bytes == 0 and status["counters"]["local"] == pytest.approx(each, rel=0.02)
        assert status["counters"]["sent"] == pytest.approx(each * (1 + (m - 1) / k), rel=0.02)
        live = sum(o["bytes"] for o in status["objects"])
        assert live == pytest.approx(each * n / k, rel=0.05)
    seen = survey(clients[0])
    tree = restore_tree(ObjectReader(clients[0], seen.found[0]), None, None)
    for state in states:
        for name, array in state.items():
            assert np.array_equal(tree[name], array)
    # One trainer, all hosts: memory is n/k of the state all the same.
    single = clients[0]
    whole = {"w": np.random.default_rng(9).integers(0, 256, 6 << 20, np.uint8)}
    save_object(single, take(whole), Request("one", 1))
    found = survey(single).named("one")[0]
    assert found.num_bytes == pytest.approx((6 << 20) * n / k, rel=0.05)
    assert single.sent_bytes == pytest.approx(sent_bytes(found.manifest.layouts[0])["w0"], rel=1e-3)
    for own in clients:
        own.close()


def test_foreign_and_stale_jobs_are_refused(fleet):
    fleet.start(2)
    state = take({"x": np.ones(9)})
    with pytest.raises(CheckpointError, match="serves job 'test', not 'other'"):
        save_object(Client(fleet.config(1, 1, job="other", home=None)), state, Request("x", 1))
    with pytest.raises(AgentError, match="serves job 'test', not 'other'"):
        survey(Client(fleet.config(1, 1, job="other", home=None)))
    with pytest.raises(AgentError, match="token"):
        survey(Client(fleet.config(1, 1, token="guess", home=None)))
    with pytest.raises(CheckpointError, match="refused: the job token"):
        attach(fleet.hosts[0].socket, "test", "guess", 5.0)
    first = Client(fleet.config(1, 1))
    save_object(first, state, Request("x", 1))
    client._epochs.clear()  # the job starts again elsewhere
    second = Client(fleet.config(1, 1))
    save_object(second, state, Request("x", 2))
    client._epochs["test"] = 1  # and the first start, thought dead, comes back
    with pytest.raises(CheckpointError, match="epoch 1 is stale: epoch 2 of this job has begun"):
        save_object(first, state, Request("x", 3))
    assert survey(second).found[0].step == 2


def test_the_wire_trusts_nobody(fleet):
    fleet.start(2)
    own = Client(fleet.config(1, 1))
    address = fleet.hosts[0].address
    peer = own.pool.peer(address)
    for bad in (b"", b"\xff\xff\xff\xff{}", b"\x02\0\0\0[]", b"\x03\0\0\0{x}"):
        with pytest.raises(CheckpointError):
            unpack(bad)
        with pytest.raises(Exception, match=r"(?i)invalid"):
            peer._call(bad, timeout=5, metadata=peer._metadata)
    with pytest.raises(AgentError, match="no operation 'format_disk'"):
        peer.call("format_disk", timeout_s=5)
    with pytest.raises(AgentError, match="impossible numbers"):
        peer.call("begin", oid="o", name="x", step=1, epoch=1, group=0, position=0, live=[], protect=[],
                  layout={"k": 1, "m": 1, "block_bytes": 7, "writers": [], "members": ["a:1", "b:2"]}, timeout_s=5)
    with pytest.raises(AgentError, match="not here"):
        peer.put([pack({"op": "put", "oid": "none"})], timeout_s=5)
    saved = save_object(own, take({"x": np.arange(5000)}), Request("x", 1))
    with pytest.raises(AgentError, match="is committed, not open"):
        peer.put([pack({"op": "put", "oid": saved.oid}), pack({"s": 0, "b": 0, "n": 1}, b"\0" * 4104)], timeout_s=5)
    with pytest.raises(AgentError, match=r"blocks 0\.\.99999 of stripe 0 are not in"):
        list(peer.get("read", oid=saved.oid, runs=[[0, 0, 99999]], timeout_s=5))
    assert unpack(pack({"a": 1}, b"xy", b"z")) == ({"a": 1}, b"xyz")
    own.close()


@pytest.fixture
def certificates(tmp_path):
    """A throw-away authority and one certificate for 127.0.0.1, made by the openssl command."""
    def openssl(*arguments):
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    names = {n: str(tmp_path / n) for n in ("ca.pem", "ca.key", "cert.pem", "cert.key", "csr", "ext")}
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", names["ca.key"], "-out", names["ca.pem"],
            "-days", 1, "-subj", "/CN=test-ca")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", names["cert.key"], "-out", names["csr"],
            "-subj", "/CN=agent")
    with open(names["ext"], "w") as file:
        file.write("subjectAltName=IP:127.0.0.1")
    openssl("x509", "-req", "-in", names["csr"], "-CA", names["ca.pem"], "-CAkey", names["ca.key"],
            "-CAcreateserial", "-out", names["cert.pem"], "-days", 1, "-extfile", names["ext"])
    return Tls(names["ca.pem"], names["cert.pem"], names["cert.key"])


def test_tls_both_ways(fleet, certificates):
    fleet.start(3, env={"HETJAX_JOB_TOKEN": "s3cret"}, extra=(
        "--tls-ca", certificates.ca, "--tls-cert", certificates.cert, "--tls-key", certificates.key))
    own = Client(fleet.config(2, 1, token="s3cret", tls=certificates))
    state = {"x": np.arange(40_000)}
    save_object(own, take(state), Request("x", 1))
    tree = restore_tree(ObjectReader(own, survey(own).found[0]), None, None)
    assert np.array_equal(tree["x"], state["x"])
    plain = Client(fleet.config(2, 1, token="s3cret", home=None, rpc_timeout_s=2.0))
    assert len(survey(plain).silent) == 3, "an agent with TLS must not answer without"
    own.close()
    plain.close()


def test_sigterm_drains_and_a_job_elsewhere_goes_on(fleet, tmp_path):
    drain = tmp_path / "shared"
    fleet.start(3, extra=("--drain-dir", str(drain), "--drain-grace", "20"))
    config = fleet.config(2, 1)
    options = ocp.CheckpointManagerOptions(save_interval_steps=1000)
    state = lambda s: {"w": jnp.full(4000, float(s))}  # noqa: E731
    with ECCheckpointManager(tmp_path / "ck", options, config=config, memory_every=2) as manager:
        for step in (1, 2, 4, 6):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
    for host in fleet.hosts:
        os.kill(host.process.pid, signal.SIGTERM)
    for host in fleet.hosts:
        assert host.process.wait(timeout=30) == 0
        host.process.stdout.close()
    fleet.hosts.clear()
    # Other hosts, empty agents; one of the drained parts did not make it.
    next(drain.rglob("*.chunks")).unlink()
    fleet.start(3)
    with ECCheckpointManager(tmp_path / "ck", options, memory_every=2,
                             config=fleet.config(2, 1, drain_dir=str(drain))) as manager:
        assert manager.latest_step() == 6
        got = manager.restore(args=ocp.args.StandardRestore(state(0)))
        assert (got["w"] == 6).all()
        manager.save(8, args=ocp.args.StandardSave(got))
        manager.wait_until_finished()
        assert manager.latest_step() == 8


def _cli(*arguments):
    result = CliRunner().invoke(ckpt, [*arguments, "--json"], standalone_mode=False)
    assert result.exception is None, result.exception
    return result.return_value, json.loads(result.output)


def test_command_line_over_live_agents(fleet):
    fleet.start(3)
    own = Client(fleet.config(2, 1))
    save_object(own, take({"x": np.arange(3000)}), Request("run/state", 7))
    where = ["--agents", ",".join(h.address for h in fleet.hosts), "--job", "test"]
    code, listed = _cli("ls", *where)
    assert code == 0 and listed["steps"][0] | {"step": 7, "code": ["2+1"], "margin": 1, "held": 3} == listed["steps"][0]
    code, status = _cli("status", *where)
    assert code == 0 and all(a["capacity_bytes"] == 8 << 20 and a["rss_bytes"] > 0 for a in status["agents"])
    assert _cli("verify", *where)[0] == 0
    assert _cli("verify", "--step", "3", *where)[0] == 1
    for command in ("ls", "status", "scrub", "verify", "repair"):
        result = CliRunner().invoke(ckpt, [command, *where], standalone_mode=False)
        assert result.exception is None and result.output, command
    for host in fleet.hosts[:2]:
        fleet.kill(host)
    code, listed = _cli("ls", *where)
    assert code == 1 and not listed["steps"][0]["recoverable"] and len(listed["silent"]) == 2
    code, report = _cli("repair", *where)
    assert code == 1 and fleet.hosts[0].address in report["failed"][0]
    assert _cli("status", *where)[0] == 1
    own.close()


@pytest.mark.quick
def test_size_says_what_a_code_costs():
    code, answer = _cli("size", "--state", "1200GB", "--hosts", "12", "-k", "4", "-m", "2", "--link", "1GB/s")
    assert code == 0
    assert answer["version_bytes"] == pytest.approx(150e9) and answer["memory_bytes"] == pytest.approx(300e9)
    assert answer["sent_bytes"] == pytest.approx(125e9) and answer["send_s"] == pytest.approx(125)
    assert answer["replication_bytes"] == pytest.approx(300e9) and answer["groups"] == [[6, 2], [6, 2]]
    assert answer["survival_of_losses"]["2"] == 1 and 0 < answer["survival_of_losses"]["3"] < 1
    result = CliRunner().invoke(ckpt, ["size", "--state", "1GB", "--hosts", "3", "-k", "4", "-m", "2"])
    assert isinstance(result.exception, CheckpointError)


def test_metrics_endpoint(fleet, free_port):
    port = free_port()
    fleet.start(1, extra=("--metrics-port", str(port)))
    fleet.start(2)
    own = Client(fleet.config(2, 1))
    save_object(own, take({"x": np.arange(30_000)}), Request("run/state", 7))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    assert 'hetjax_agent_newest_step{name="run/state"} 7.0' in text
    assert 'hetjax_agent_objects{state="committed"} 1.0' in text
    assert "hetjax_agent_memory_bytes 8.388608e+06" in text and 'kind="local"' in text
    own.close()


def test_agent_refuses_to_serve_the_world_without_a_token():
    result = subprocess.run(
        [sys.executable, "-m", "hetjax", "agent", "--listen", "0.0.0.0:0", "--memory", "1MiB"],
        capture_output=True, text=True, env={k: v for k, v in os.environ.items() if k != "HETJAX_JOB_TOKEN"},
    )
    assert result.returncode == 1 and "would serve anybody" in result.stderr


@pytest.mark.quick
def test_configuration_names_every_problem(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError) as error:
        Config(agents=("a", "b:1", "b:1"), k=0, writer=(0, 2))
    for part in ("k=0", "'a' is not HOST:PORT", "listed twice", "writer needs"):
        assert part in str(error.value)
    file = tmp_path / "ec.toml"
    (tmp_path / "token").write_text("abc\n")
    file.write_text(f'[eccheck]\nagents = ["h0:1", "h1:1"]\nk = 4\nm = 2\ntoken_file = "{tmp_path}/token"\n'
                    '[eccheck.domains]\n"h0:1" = "rack0"\n')
    loaded = load_config(file)
    assert (loaded.k, loaded.m, loaded.token, loaded.domains) == (4, 2, "abc", {"h0:1": "rack0"})
    assert "abc" not in repr(loaded)
    monkeypatch.setenv("HETJAX_AGENTS", "x:1, y:2")
    monkeypatch.setenv("HETJAX_EC_K", "3")
    monkeypatch.setenv("HETJAX_ECCHECK", str(file))
    loaded = load_config()
    assert loaded.agents == ("x:1", "y:2") and loaded.k == 3 and loaded.m == 2
    file.write_text("[eccheck]\nagnets = []\n")
    with pytest.raises(CheckpointError, match="unknown keys agnets"):
        load_config(file)


@pytest.mark.quick
def test_usable_without_the_parallelizer():
    script = (
        "import sys, hetjax.eccheck.server, hetjax.cli.agent, hetjax.cli.ckpt\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('jax', 'flax', 'optax', 'orbax')"
        " or m.startswith(('hetjax.passes', 'hetjax.frontend', 'hetjax.runtime'))]\n"
        "assert not bad, bad\n"
        "import hetjax.eccheck.handler, hetjax.eccheck.manager\n"
        "bad = [m for m in sys.modules if m.startswith(('hetjax.passes', 'hetjax.frontend', 'hetjax.runtime'))]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
