"""Puts an agent on the network: gRPC for the other hosts, a unix socket for trainers of its own."""

from __future__ import annotations

import hmac
import json
import os
import pathlib
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hetjax.eccheck import wire
from hetjax.eccheck.agent import Agent, AgentOptions
from hetjax.eccheck.bulk import serve_bulk
from hetjax.eccheck.peer import CHANNEL_OPTIONS
from hetjax.eccheck.store import Refused
from hetjax.ir.errors import CheckpointError


def _guard(agent: Agent, context: Any) -> None:
    """Ends the call unless it knows the job and its secret."""
    import grpc

    metadata = dict(context.invocation_metadata())
    if not hmac.compare_digest(str(metadata.get("hetjax-token", "")), agent.options.token):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job token is not the agent's")
    if metadata.get("hetjax-job") != agent.options.job:
        context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"this agent serves job '{agent.options.job}', not '{metadata.get('hetjax-job')}'",
        )


def _abort(context: Any, error: BaseException) -> None:
    import grpc

    if isinstance(error, (Refused, wire.AgentError)):
        status = getattr(grpc.StatusCode, error.code.upper(), grpc.StatusCode.INTERNAL)
        if isinstance(error, wire.AgentError):  # another agent's trouble, told on: name it
            status = grpc.StatusCode.ABORTED
    elif isinstance(error, (CheckpointError, KeyError, ValueError, TypeError, StopIteration)):
        status = grpc.StatusCode.INVALID_ARGUMENT
    else:
        status = grpc.StatusCode.INTERNAL
    context.abort(status, str(error) or repr(error))


def serve(agent: Agent) -> Any:
    """Starts the gRPC server and the local socket; returns the server.

    Raises:
      CheckpointError: the address or the socket cannot be bound.
    """
    import grpc

    def call(message: bytes, context: Any) -> bytes:
        _guard(agent, context)
        try:
            header, payload = agent.handle(*wire.unpack(message))
            return wire.pack(header, payload)
        except Exception as error:
            _abort(context, error)
            raise

    def put(messages: Iterator[bytes], context: Any) -> bytes:
        _guard(agent, context)
        try:
            return wire.pack(agent.receive(messages))
        except grpc.RpcError:
            raise
        except Exception as error:
            _abort(context, error)
            raise

    def get(message: bytes, context: Any) -> Iterator[bytes]:
        _guard(agent, context)
        try:
            yield from agent.send(wire.unpack(message)[0])
        except Exception as error:
            _abort(context, error)
            raise

    handlers = grpc.method_handlers_generic_handler(
        wire.SERVICE,
        {
            "Call": grpc.unary_unary_rpc_method_handler(call),
            "Put": grpc.stream_unary_rpc_method_handler(put),
            "Get": grpc.unary_stream_rpc_method_handler(get),
        },
    )
    server = grpc.server(
        ThreadPoolExecutor(96, thread_name_prefix="eccheck-agent"), handlers=[handlers],
        options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)],
    )
    host, _, _ = agent.options.listen.rpartition(":")
    try:
        tls = agent.options.tls
        if tls is None:
            port = server.add_insecure_port(agent.options.listen)
        else:
            ca, cert, key = (pathlib.Path(p).read_bytes() for p in (tls.ca, tls.cert, tls.key))
            credentials = grpc.ssl_server_credentials(
                [(key, cert)], root_certificates=ca, require_client_auth=True
            )
            port = server.add_secure_port(agent.options.listen, credentials)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot listen on {agent.options.listen}: {error}") from error
    agent.address = f"{host}:{port}"
    if tls is None:
        agent.bulk_port = serve_bulk(agent, host, agent.options.bulk_port)
    if agent.options.socket:
        _serve_local(agent, agent.options.socket)
    server.start()
    if agent.options.scrub_interval_s > 0:
        threading.Thread(target=_scrub_loop, args=(agent,), daemon=True).start()
    if agent.options.metrics_port:
        from hetjax.eccheck.metrics import serve_metrics

        try:
            serve_metrics(agent, agent.options.metrics_port)
        except (OSError, OverflowError) as error:
            raise CheckpointError(
                f"cannot serve metrics on port {agent.options.metrics_port}: {error}"
            ) from error
    return server


def _scrub_loop(agent: Agent) -> None:
    from hetjax.eccheck.repair import heal

    while not agent.stopping.wait(agent.options.scrub_interval_s):
        if agent.scrub()["damaged"]:
            heal(agent)


def _serve_local(agent: Agent, path: str) -> None:
    """Hands the memory's descriptor to processes of this host and user that know the token."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path):
            probe = socket.socket(socket.AF_UNIX)
            try:
                probe.connect(path)
            except OSError:
                os.unlink(path)  # left by an agent that is gone
            else:
                raise CheckpointError(f"another agent listens on {path}")
            finally:
                probe.close()
        old = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(old)
    except OSError as error:
        raise CheckpointError(f"cannot listen on {path}: {error}") from error
    listener.listen(64)
    agent.listeners.append(listener)

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5.0)
            try:
                _, uid, _ = struct.unpack(
                    "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                )
                request = json.loads(connection.recv(65536))
                if uid not in (os.getuid(), 0):
                    reply = {"error": f"user {uid} is not the agent's"}
                elif not hmac.compare_digest(str(request.get("token", "")), agent.options.token):
                    reply = {"error": "the job token is not the agent's"}
                elif request.get("job") != agent.options.job:
                    reply = {"error": f"this agent serves job '{agent.options.job}'"}
                else:
                    reply = {"id": agent.id, "capacity_bytes": agent.arena.capacity_bytes}
                fds = [] if "error" in reply else [agent.arena.fd]
                socket.send_fds(connection, [json.dumps(reply).encode()], fds)
            except (OSError, ValueError, AttributeError):
                return

    def loop() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=loop, daemon=True, name="eccheck-local").start()


def _keep_message_memory() -> None:
    """Makes glibc reuse the memory of messages instead of giving it back after each.

    glibc raises its thresholds for mmap and trim to the largest block it has seen freed, up to
    32 MiB. Without this every message is mapped, faulted in and unmapped again, which took a third
    of the processor time of a transfer. In the agent only: how a trainer's memory behaves is its own.
    """
    block = bytearray(31 << 20)
    del block


def run(options: AgentOptions, ready: Callable[[dict[str, Any]], None]) -> int:
    """Runs an agent until SIGTERM or SIGINT; returns the exit code.

    Args:
      options: how to start it.
      ready: told the address, id and pid once it answers.
    """
    import signal

    _keep_message_memory()
    agent = Agent(options)
    server = serve(agent)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    ready(agent.hello() | {"socket": options.socket})
    while not done.wait(3600):
        pass
    code = 0
    if options.drain_dir:
        from hetjax.eccheck.drain import drain_agent

        # In a thread of its own: a disk that hangs must not outlast the grace.
        written = threading.Event()

        def drain() -> None:
            try:
                drain_agent(agent, options.drain_dir, written.set)
            except CheckpointError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)

        worker = threading.Thread(target=drain, daemon=True)
        worker.start()
        worker.join(options.drain_grace_s)
        code = 0 if written.is_set() else 1
    agent.stop()
    server.stop(0.5).wait(2)
    if options.socket and os.path.exists(options.socket):
        os.unlink(options.socket)
    return code

