"""Which byte of which writer lies in which chunk of which agent.

A group has n = k + m members, one agent a position. The object of a group is cut into n stripes;
every member holds exactly one chunk of each stripe, so a chunk is named by (position, stripe). In
stripe j the parity rows 0..m-1 lie at positions j, j+1, ..., j+m-1 (mod n) and the data columns
0..k-1 at the k positions after them: parity rotates, as in RAID-6, and every network card carries
an equal share. Each member has k data chunks and m parity chunks: n/k times the state.

Example, 2+1 (D data, P parity):

           stripe 0  stripe 1  stripe 2
  agent 0     P         D         D
  agent 1     D         P         D
  agent 2     D         D         P

Bytes stay where they are made: a writer fills the data chunks of its own agent first. What exceeds
them (its state is larger than its share) goes to the free space of the others, so that memory and
parity follow the group's total, not its largest member. What is not filled is zero by agreement:
never sent, never stored.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetjax.ir.errors import CheckpointError

MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 4 << 10, 256 << 10
# Rounding wastes up to one block a data chunk; with this many blocks in a chunk that is below 1 %.
_BLOCKS_PER_CHUNK = 128


@dataclass(frozen=True)
class Extent:
    """A run of blocks of one writer that lie together in one chunk.

    Attributes:
      writer_block: first block in the writer's own numbering.
      position: member that holds it.
      stripe: stripe of the chunk.
      chunk_block: first block within the chunk.
      num_blocks: length.
    """

    writer_block: int
    position: int
    stripe: int
    chunk_block: int
    num_blocks: int


@dataclass(frozen=True)
class Layout:
    """The layout of one group; everything else is computed from these numbers.

    Attributes:
      k: data chunks of a stripe.
      m: parity chunks of a stripe.
      block_bytes: unit of placement and of checksums.
      writers: per writer of this group (its number in the job, home position or -1, bytes).
      members: the agents' addresses by position, as they were at the save.
    """

    k: int
    m: int
    block_bytes: int
    writers: tuple[tuple[int, int, int], ...]
    members: tuple[str, ...]

    @property
    def n(self) -> int:
        """Members of the group, chunks of a stripe, and stripes."""
        return self.k + self.m

    def role(self, position: int, stripe: int) -> int:
        """Returns the chunk's number in the code: 0..k-1 data column, k..n-1 parity row."""
        turn = (position - stripe) % self.n
        return self.k + turn if turn < self.m else turn - self.m

    def holder(self, role: int, stripe: int) -> int:
        """Returns the position that holds chunk number `role` of a stripe."""
        turn = role - self.k if role >= self.k else role + self.m
        return (stripe + turn) % self.n

    def data_stripes(self, position: int) -> list[int]:
        """Returns the stripes in which a position holds data, ascending."""
        return [j for j in range(self.n) if self.role(position, j) < self.k]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain lists and numbers."""
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Layout:
        """Returns the layout that `to_json` gave.

        Raises:
          CheckpointError: the fields are not those of a layout.
        """
        try:
            layout = Layout(
                k=int(fields["k"]), m=int(fields["m"]), block_bytes=int(fields["block_bytes"]),
                writers=tuple((int(w), int(h), int(b)) for w, h, b in fields["writers"]),
                members=tuple(str(a) for a in fields["members"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not a chunk layout: {error!r}") from error
        problems = []
        if layout.k < 1 or layout.m < 0 or layout.n > 255:
            problems.append(f"k={layout.k}, m={layout.m}")
        if len(layout.members) != layout.n:
            problems.append(f"{len(layout.members)} members for {layout.n} positions")
        if not MIN_BLOCK_BYTES <= layout.block_bytes <= 1 << 30 or layout.block_bytes % 64:
            problems.append(f"blocks of {layout.block_bytes} bytes")
        if any(b < 0 or not -1 <= h < layout.n for _, h, b in layout.writers):
            problems.append("a writer's size or home")
        if problems:
            raise CheckpointError(f"a chunk layout with impossible numbers: {'; '.join(problems)}")
        return layout


@dataclass(frozen=True)
class Placement:
    """A layout worked out.

    Attributes:
      chunk_blocks: blocks of a full chunk.
      extents: writer number -> its extents, in the order of its bytes.
      used_blocks: [position][stripe] -> blocks that are stored; the rest is zero.
    """

    chunk_blocks: int
    extents: dict[int, tuple[Extent, ...]]
    used_blocks: tuple[tuple[int, ...], ...]


def pick_block_bytes(total_bytes: int, k: int, m: int) -> int:
    """Returns the block size, a power of two, that keeps rounding below about one per cent."""
    ideal = max(1, total_bytes // ((k + m) * k * _BLOCKS_PER_CHUNK))
    return min(MAX_BLOCK_BYTES, max(MIN_BLOCK_BYTES, 1 << (ideal.bit_length() - 1)))


@functools.lru_cache(maxsize=64)
def place(layout: Layout) -> Placement:
    """Returns where every block of every writer goes.

    Home chunks first, then what is left over in order of writer number into free space in order
    of position. Deterministic: reader and writer work it out for themselves.
    """
    block, n, k = layout.block_bytes, layout.n, layout.k
    blocks_of = {w: -(-size // block) for w, _, size in layout.writers}
    chunk_blocks = -(-sum(blocks_of.values()) // (n * k))
    filled = [0] * n  # data blocks taken at each position
    stripes = [layout.data_stripes(p) for p in range(n)]
    extents: dict[int, list[Extent]] = {w: [] for w, _, _ in layout.writers}
    done = dict.fromkeys(blocks_of, 0)

    def fill(writer: int, position: int) -> None:
        while done[writer] < blocks_of[writer] and filled[position] < k * chunk_blocks:
            index, at = divmod(filled[position], chunk_blocks)
            run = min(chunk_blocks - at, blocks_of[writer] - done[writer])
            extents[writer].append(
                Extent(done[writer], position, stripes[position][index], at, run)
            )
            done[writer] += run
            filled[position] += run

    for writer, home, _ in layout.writers:
        if home >= 0:
            fill(writer, home)
    for writer, _, _ in layout.writers:
        for position in range(n):
            fill(writer, position)
    used = [[0] * n for _ in range(n)]
    for position in range(n):
        for index, stripe in enumerate(stripes[position]):
            used[position][stripe] = min(chunk_blocks, max(0, filled[position] - index * chunk_blocks))
    for stripe in range(n):
        longest = max(used[layout.holder(c, stripe)][stripe] for c in range(k))
        for row in range(layout.m):
            used[layout.holder(k + row, stripe)][stripe] = longest
    return Placement(
        chunk_blocks,
        {w: tuple(e) for w, e in extents.items()},
        tuple(tuple(row) for row in used),
    )


def sole_writer(layout: Layout, stripe: int) -> int:
    """Returns the writer that owns all data of a stripe, or -1.

    Such a writer makes the parity itself, since nothing has to be fetched for it.
    """
    owners = {
        w for w, extents in place(layout).extents.items() if any(e.stripe == stripe for e in extents)
    }
    return owners.pop() if len(owners) == 1 else -1


def form_groups(
    addresses: Sequence[str], k: int, m: int, domains: Mapping[str, str] | None = None
) -> list[tuple[int, int, tuple[str, ...]]]:
    """Returns groups (k, m, members) over the agents at hand.

    Agents are dealt to groups domain by domain, so that members of a group sit in as many failure
    domains as there are. Every group has at least k + m members where there are that many agents;
    a remainder makes some groups larger (more data chunks, same m). With fewer agents than k + m
    there is one group with less data chunks, and with m or fewer agents less parity too: the
    caller says so to the user.

    Args:
      addresses: the agents, in the order of the configuration.
      k: data chunks wanted.
      m: losses to survive.
      domains: address -> failure domain (rack, site); an agent not named is its own domain.

    Raises:
      CheckpointError: there is no agent.
    """
    if not addresses:
        raise CheckpointError("no checkpoint agent answers; start `hetjax agent` on every host")
    domains = domains or {}
    count = max(1, len(addresses) // (k + m))
    by_domain: dict[str, list[str]] = {}
    for address in addresses:
        by_domain.setdefault(domains.get(address, address), []).append(address)
    dealt: list[list[str]] = [[] for _ in range(count)]
    turn = 0
    for members in sorted(by_domain.values(), key=len, reverse=True):
        for address in members:
            dealt[turn % count].append(address)
            turn += 1
    order = {address: i for i, address in enumerate(addresses)}
    groups = []
    for members in dealt:
        parity = min(m, len(members) - 1)
        ordered = tuple(sorted(members, key=order.__getitem__))
        groups.append((len(members) - parity, parity, ordered))
    return groups


def sent_bytes(layout: Layout) -> dict[str, int]:
    """Returns the payload bytes each party sends in a save: agents by address, writers as w0, w1...

    With equal writers at home on every member: k segments go to the encoders and m - 1 parities to
    the other parity holders, S * (1 + (m - 1) / k) a host.
    """
    placed, sent = place(layout), dict.fromkeys(layout.members, 0)
    homes = {w: h for w, h, _ in layout.writers}
    for writer, extents in placed.extents.items():
        sent[f"w{writer}"] = layout.block_bytes * sum(
            e.num_blocks for e in extents if e.position != homes[writer]
        )
    for stripe in range(layout.n):
        length = layout.block_bytes * placed.used_blocks[layout.holder(layout.k, stripe)][stripe] if layout.m else 0
        sole = sole_writer(layout, stripe)
        if sole >= 0:
            sent[f"w{sole}"] += length * sum(
                layout.holder(layout.k + row, stripe) != homes[sole] for row in range(layout.m)
            )
            continue
        for column in range(layout.k if layout.m else 0):
            position = layout.holder(column, stripe)
            sent[layout.members[position]] += (
                placed.used_blocks[position][stripe] * layout.block_bytes
            )
        if layout.m:
            encoder = layout.members[layout.holder(layout.k, stripe)]
            sent[encoder] += (layout.m - 1) * length
    return sent
