"""What goes over the wire: a small framing inside gRPC messages, no generated code.

A message is

    uint32 little-endian   length of the header
    header                 JSON object, UTF-8
    payload                raw bytes, may be empty

Three methods, all under `/hetjax.eccheck.Agent/`:

    Call   unary -> unary     header {"op": NAME, ...}: everything small
    Put    stream -> unary    first message {"op": "put" | "prepare", ...}, then bytes
    Get    unary -> stream    header {"op": "read" | "manifest" | "sums", ...}: bytes come back

The metadata of every call hold `hetjax-job` and `hetjax-token`. Lengths are bounded before anything
is allocated: nothing here trusts the other side.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from hetjax.ir.errors import CheckpointError

SERVICE = "hetjax.eccheck.Agent"
PROTOCOL = 1
# Payload of one message of bulk data: below, the cost of a message shows; above, it leaves the cache.
PAYLOAD_BYTES = 2 << 20
MAX_MESSAGE_BYTES = 32 << 20
_HEADER_LIMIT = 8 << 20
_LENGTH = struct.Struct("<I")
Run = tuple[int, int, int]  # stripe, first block, number of blocks


class AgentError(CheckpointError):
    """An agent refused, failed, or did not answer in time.

    Attributes:
      code: gRPC status in lower case, as "deadline_exceeded", "failed_precondition".
      address: the agent.
    """

    def __init__(self, message: str, *, code: str = "internal", address: str = ""):
        self.code, self.address, self.detail = code, address, message
        super().__init__(f"agent {address}: {message}" if address else message)


def pack(header: dict[str, Any], *payload: Any) -> bytes:
    """Returns one message.

    Args:
      header: what JSON can hold.
      payload: buffers, joined in one copy.
    """
    head = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *payload))


def unpack(message: bytes) -> tuple[dict[str, Any], memoryview]:
    """Returns header and payload (a view, not a copy).

    Raises:
      CheckpointError: the message is malformed or its header too long.
    """
    view = memoryview(message)
    if len(view) < _LENGTH.size:
        raise CheckpointError(f"a message of {len(view)} bytes has no header length")
    (length,) = _LENGTH.unpack_from(view)
    if length > min(_HEADER_LIMIT, len(view) - _LENGTH.size):
        raise CheckpointError(f"a header of {length} bytes does not fit its message")
    try:
        header = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
    except ValueError as error:
        raise CheckpointError(f"a header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError("a header is not a JSON object")
    return header, view[_LENGTH.size + length :]


def blocks_per_message(block_bytes: int) -> int:
    """Returns how many blocks travel together."""
    return max(1, PAYLOAD_BYTES // block_bytes)


def split_runs(runs: Sequence[Run], block_bytes: int) -> Iterator[Run]:
    """Yields the runs in pieces of one message; pieces of equal stripes begin at equal blocks."""
    per = blocks_per_message(block_bytes)
    for stripe, block, count in runs:
        while count > 0:
            piece = min(count, per - block % per)
            yield stripe, block, piece
            block, count = block + piece, count - piece
