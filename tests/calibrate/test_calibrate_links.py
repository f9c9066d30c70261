"""Links measured over real sockets: loopback, a wire with rate and delay, namespaces shaped by tc."""

import contextlib
import json
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from hetjax.calibrate.cluster_file import described_link, differences, write_link
from hetjax.calibrate.links import LinkMeasurement, measure, open_server, serve
from hetjax.cli.main import cli
from hetjax.ir.cluster import Cluster, Link
from hetjax.ir.errors import ClusterError

CLUSTER = """# Two rooms.
name = "pair"
[[sites]]
name = "lyon"
link = "10gbe"   # the switch
nodes = [{ kind = "t4", devices = 1, count = 2 }]
[[sites]]
name = "oslo"
nodes = [{ kind = "t4", devices = 1 }]
[links.wan]
between = ["lyon", "oslo"]
bandwidth_gbit_s = 1   # promised
latency_ms = 5
source = "the provider"
"""


@contextlib.contextmanager
def serving(**options):
    """Gives the port of a server in a thread, which must have ended afterwards."""
    server = open_server("127.0.0.1", 0)
    thread = threading.Thread(target=serve, args=(server,), kwargs=options, daemon=True)
    thread.start()
    with server:
        yield server.getsockname()[1]
        thread.join(10)
        assert not thread.is_alive()


class Wire:
    """A TCP proxy with a rate and a delay each way; of half duplex, both ways share the rate."""

    def __init__(self, port, bytes_s, delay_s, shared=False):
        self.port, self.bytes_s, self.delay_s = port, bytes_s, delay_s
        self.free, self.lock = [0.0, 0.0], threading.Lock()
        self.line = [0, 0] if shared else [0, 1]
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self.listener.getsockname()[1]

    def __exit__(self, *_):
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.listener.close()

    def _run(self):
        near, _ = self.listener.accept()
        with near, socket.create_connection(("127.0.0.1", self.port)) as far:
            ends = []
            for way, (a, b) in enumerate(((near, far), (far, near))):
                a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                due = queue.Queue()
                ends.append(threading.Thread(target=self._read, args=(way, a, due), daemon=True))
                ends.append(threading.Thread(target=self._write, args=(b, due), daemon=True))
            for thread in ends:
                thread.start()
            for thread in ends:
                thread.join()

    def _read(self, way, source, due):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                with self.lock:
                    line = self.line[way]
                    self.free[line] = max(time.perf_counter(), self.free[line]) + len(data) / self.bytes_s
                    due.put((self.free[line] + self.delay_s, data))
        due.put((0.0, b""))

    def _write(self, target, due):
        with contextlib.suppress(OSError):
            while True:
                at, data = due.get()
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                while (left := at - time.perf_counter()) > 0:
                    time.sleep(left)
                target.sendall(data)


def test_loopback():
    with serving() as port:
        found = measure("127.0.0.1", port, sizes=(1 << 14, 1 << 18, 1 << 22), budget_s=0.5)
    assert 0 < found.latency_s < 5e-3
    link = found.link("lo", "a test")
    assert link.bandwidth_bytes_s > 1e7 and link.latency_s == found.latency_s
    assert [n for n, _ in link.curve][-1] == 1 << 22


@pytest.mark.parametrize("shared", [False, True])
def test_a_wire_of_known_rate_delay_and_duplex(shared):
    rate, delay = 20e6, 0.01
    with serving() as port, Wire(port, rate, delay, shared) as near:
        found = measure("127.0.0.1", near, sizes=(1 << 17, 1 << 19, 1 << 20), budget_s=1.0)
    assert found.latency_s == pytest.approx(delay, rel=0.2)
    for curve in (found.there, found.back):
        assert curve[-1][1] == pytest.approx(rate, rel=0.15)
    assert found.duplex == ("half" if shared else "full"), found.both_over_one


def test_a_server_that_is_kept_serves_on_and_strangers_do_not_end_it():
    server = open_server("127.0.0.1", 0)
    port, heard = server.getsockname()[1], []
    thread = threading.Thread(target=serve, args=(server,), kwargs={"keep": True, "told": heard.append}, daemon=True)
    thread.start()
    with server:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for _ in range(2):
            assert measure("127.0.0.1", port, sizes=(1 << 16, 1 << 20), budget_s=0.1).there
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()
    assert [line for line in heard if "measured" in line]


def test_nobody_there_or_somebody_else_is_told_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match=r"no server at 127.0.0.1:\d+ .*hetjax calibrate --links --serve --port"):
        measure("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        def greet():
            end, _ = other.accept()
            with end, contextlib.suppress(OSError):
                end.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                end.recv(1)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        with pytest.raises(ClusterError, match="no server of hetjax links 1"):
            measure("127.0.0.1", other.getsockname()[1])
        thread.join(10)
        with pytest.raises(ClusterError, match="cannot serve on"):
            open_server("127.0.0.1", other.getsockname()[1])


def test_a_measurement_goes_into_the_file_and_leaves_the_rest(tmp_path):
    path = tmp_path / "pair.toml"
    path.write_text(CLUSTER)
    measured = Link("wan", 8e7, 0.0123456, curve=((4096, 1e6), (65536, 1.001e6), (1 << 20, 8e7)), duplex="half", source="a test")
    before = described_link(Cluster.from_toml(path), "oslo-lyon")
    said = differences(before, measured)
    assert len(said) == 3 and "bandwidth is 1.25e+08 bytes/s in the file and 8e+07 bytes/s measured (-36%)" in said[0]
    assert "latency is 0.005 s in the file and 0.01235 s measured (+147%)" in said[1] and "duplex" in said[2]
    write_link(path, "lyon-oslo", measured)
    again = Cluster.from_toml(path).link_named("wan")
    assert (again.bandwidth_bytes_s, again.latency_s, again.duplex, again.source) == (8e7, 0.01235, "half", "a test")
    assert again.curve == ((4096, 1e6), (1 << 20, 8e7))  # the middle point said nothing new
    text = path.read_text()
    assert "# Two rooms." in text and "# the switch" in text and "bandwidth_gbit_s" not in text
    # A preset that a site names becomes a table of its own.
    write_link(path, "10gbe", measured)
    assert Cluster.from_toml(path).link(0, 1).bandwidth_bytes_s == 8e7
    assert differences(Cluster.from_toml(path).link_named("wan"), measured) == []


def test_an_unknown_link_names_the_key_and_the_nearest(tmp_path):
    path = tmp_path / "pair.toml"
    path.write_text(CLUSTER)
    with pytest.raises(ClusterError, match=r"links\.wam: .* no link 'wam'; did you mean 'wan'"):
        write_link(path, "wam", Link("wam", 1.0, 0.0))
    path.write_text(CLUSTER.replace("bandwidth_gbit_s = 1 ", "bandwidth_gbit_s = -1 "))
    with pytest.raises(ClusterError, match=r"pair.toml:12.*bandwidth"):
        write_link(path, "wan", Link("wan", 1.0, 0.0))


def command(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "hetjax", "calibrate", "--links", *words], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, **options,
    )


def test_the_two_commands_measure_write_and_warn(tmp_path):
    path = tmp_path / "pair.toml"
    path.write_text(CLUSTER)
    with command("--serve", "--bind", "127.0.0.1", "--port", "0", "--json") as server:
        port = json.loads(server.stdout.readline())["port"]
        answer = connected(path, port)
        assert server.wait(20) == 0
    assert answer["ok"] and answer["there"] and answer["back"]
    # Loopback is far quicker than the file's gigabit over 5 ms.
    assert any("bandwidth" in s for s in answer["warnings"]) and any("latency" in s for s in answer["warnings"])
    written = Cluster.from_toml(path).link_named("wan")
    assert written.bandwidth_bytes_s == pytest.approx(answer["bandwidth_bytes_s"], rel=1e-6)
    assert written.source.startswith("measured with hetjax calibrate --links")


def connected(path, port):
    words = ["calibrate", "--links", "--connect", "127.0.0.1", "--port", str(port), "--cluster", str(path), "--link", "wan",
             "--sizes", "65536,1048576", "--budget", "0.3"]
    return json.loads(CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False).stdout)


@pytest.mark.parametrize(("words", "says"), [
    (["--links"], "give --serve on one host"),
    (["--links", "--serve", "--connect", "x"], "give --serve on one host"),
    (["--links", "--connect", "x", "--link", "wan"], "go together"),
    (["--links", "--connect", "x", "--keep"], "--keep needs --serve"),
    (["--links", "step.py:build", "--serve"], "--links measures a link and nothing else"),
    (["--serve"], "need --links"),
    ([], "give FILE.py:build"),
])
def test_what_does_not_go_together_is_said(words, says):
    result = CliRunner().invoke(cli, ["calibrate", *words], standalone_mode=False)
    assert says in str(result.exception)


def shaped(name, *words):
    run = subprocess.run([name, *words], capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"network namespaces cannot be shaped here: {name} {' '.join(words)}: {run.stderr.strip()}")


@pytest.fixture
def namespaces():
    """Two network namespaces joined by a wire of 200 Mbit/s each way."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"network namespaces take {tool}, which is not installed")
    made = []
    try:
        for name in ("hetjax-a", "hetjax-b"):
            shaped("ip", "netns", "add", name)
            made.append(name)
        shaped("ip", "link", "add", "hj0", "netns", "hetjax-a", "type", "veth", "peer", "name", "hj0", "netns", "hetjax-b")
        for name, address in (("hetjax-a", "10.83.7.1/24"), ("hetjax-b", "10.83.7.2/24")):
            shaped("ip", "-n", name, "addr", "add", address, "dev", "hj0")
            shaped("ip", "-n", name, "link", "set", "hj0", "up")
            shaped("tc", "-n", name, "qdisc", "add", "dev", "hj0", "root", "tbf", "rate", "200mbit", "burst", "32kb", "latency", "100ms")
        yield "hetjax-a", "hetjax-b", "10.83.7.2"
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_between_namespaces_shaped_by_tc(namespaces, tmp_path):
    near, far, address = namespaces
    path = tmp_path / "pair.toml"
    path.write_text(CLUSTER)

    def inside(name, *words):
        return subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "hetjax", "calibrate", "--links", *words, "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )

    with inside(far, "--serve", "--port", "0") as server:
        port = json.loads(server.stdout.readline())["port"]
        words = ["--connect", address, "--port", str(port), "--cluster", str(path), "--link", "wan"]
        with inside(near, *words, "--sizes", "1048576,4194304", "--budget", "2") as client:
            out, error = client.communicate(timeout=60)
        assert server.wait(20) == 0 and client.returncode == 0, error
    answer = json.loads(out)
    # Of 200 Mbit/s, Ethernet, IP and TCP leave about 95 %; the token bucket lets short bursts through.
    assert answer["bandwidth_bytes_s"] == pytest.approx(200e6 / 8, rel=0.15)
    assert answer["duplex"] == "full"
    assert any("bandwidth" in s for s in answer["warnings"])
    assert Cluster.from_toml(path).link_named("wan").bandwidth_bytes_s == round(answer["bandwidth_bytes_s"])


def test_the_slower_direction_is_what_a_plan_counts_on():
    m = LinkMeasurement(0.001, ((1024, 5.0), (4096, 9.0)), ((1024, 7.0), (4096, 8.0)), "full", 1.0)
    link = m.link("x", "s", ("a", "b"))
    assert link.curve == ((1024, 5.0), (4096, 8.0)) and link.bandwidth_bytes_s == 8.0
    assert link.between == ("a", "b")
