"""The small part of a checkpoint that is serialised: what the leaves are and where their bytes lie.

JSON, a copy on every agent. Its fields:

    hetjax_eccheck   format, 1
    oid job name step epoch created_s
    groups           per group: layout (see `layout.Layout`), digests of each position's checksums
    leaves           see `snapshot.Leaf`
    extra            what the caller adds (custom metadata, metrics, items of a composite)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetjax.eccheck.layout import Layout
from hetjax.ir.errors import CheckpointError

FORMAT = 1
LIMIT_BYTES = 1 << 30


def save_of(oid: str) -> str:
    """Returns the name of the save that an object holds: made again with another code, it keeps that."""
    return oid.partition("~")[0]


def remade(oid: str) -> str:
    """Returns a name for an object that holds the same save as another."""
    return f"{save_of(oid)}~{int(oid.partition('~')[2] or 0) + 1}"


@dataclass(frozen=True)
class Manifest:
    """One object.

    Attributes:
      oid: unique name.
      job: the job.
      name: which item of which directory.
      step: training step.
      epoch: start of the job that wrote it.
      created_s: wall clock at the save.
      layouts: per group.
      digests: per group, per position.
      leaves: the tree's leaves, as `snapshot` describes them.
      extra: what the caller added.
    """

    oid: str
    job: str
    name: str
    step: int
    epoch: int
    created_s: float
    layouts: tuple[Layout, ...]
    digests: tuple[tuple[str, ...], ...]
    leaves: Sequence[Mapping[str, Any]]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The object in words."""
        return f"step {self.step} of {self.name}"

    def to_bytes(self) -> bytes:
        """Returns the manifest as JSON bytes."""
        return json.dumps(
            {
                "hetjax_eccheck": FORMAT, "oid": self.oid, "job": self.job, "name": self.name,
                "step": self.step, "epoch": self.epoch, "created_s": self.created_s,
                "groups": [
                    {"layout": layout.to_json(), "digests": list(digests)}
                    for layout, digests in zip(self.layouts, self.digests)
                ],
                "leaves": list(self.leaves), "extra": dict(self.extra),
            },
            separators=(",", ":"),
        ).encode()


def parse_manifest(data: bytes) -> Manifest:
    """Returns the manifest of these bytes.

    Raises:
      CheckpointError: they are not one.
    """
    try:
        fields = json.loads(data)
        if fields["hetjax_eccheck"] != FORMAT:
            raise CheckpointError(
                f"the checkpoint has format {fields['hetjax_eccheck']}, this version reads {FORMAT}"
            )
        return Manifest(
            oid=str(fields["oid"]), job=str(fields["job"]), name=str(fields["name"]),
            step=int(fields["step"]), epoch=int(fields["epoch"]),
            created_s=float(fields["created_s"]),
            layouts=tuple(Layout.from_json(g["layout"]) for g in fields["groups"]),
            digests=tuple(tuple(map(str, g["digests"])) for g in fields["groups"]),
            leaves=fields["leaves"], extra=fields["extra"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"not a checkpoint manifest: {error!r}") from error


def digest_of(manifest: bytes) -> str:
    """Returns the hash by which copies of a manifest are compared."""
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(manifest)


def check_digest(manifest: bytes, digest: str) -> None:
    """Raises CheckpointError unless the manifest has this hash."""
    if digest_of(manifest) != digest:
        raise CheckpointError("a manifest is damaged: its hash is not the one announced")
