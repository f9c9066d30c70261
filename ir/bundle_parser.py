"""Reads `.hj` files; see `hetjax.ir.parser`."""

from __future__ import annotations

import dataclasses
from typing import Any

from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.graph import Graph
from hetjax.ir.microbatching import BatchType, Microbatching, Refusal
from hetjax.ir.plan import Plan
from hetjax.ir.program_parser import ProgramReader

# More values than any step has; a run-length beyond it is a slip of the pen, not a graph.
_MAX_RUN = 1_000_000


_MICROBATCHING_WORDS = frozenset(
    {"types", "hoisted", "resliced", "positions", "chained", "refused", "accepted", "same", "graph"}
)


class BundleReader(ProgramReader):
    """Reads a bundle."""

    def bundle(self) -> Bundle:
        """Reads every part there is, in any order."""
        self.header()
        parts: dict[str, Any] = {}
        notes: list[tuple[str, str]] = []
        same_at: int | None = None
        while word := self.peek():
            if word in parts:
                self.fail(f"there is a second {word}; a file holds one of each part")
            self.at += 1
            if word == "note":
                notes.append((self.string("the note's topic"), self.string("the note's sentence")))
            elif word == "graph":
                parts[word] = self.graph()
            elif word == "program":
                parts[word] = self.program()
            elif word == "cluster":
                parts[word] = self.foreign_part(Cluster.parse)
            elif word == "plan":
                parts[word] = self.foreign_part(Plan.from_json)
            elif word == "microbatching":
                parts[word], same_at = self.microbatching()
            else:
                self.at -= 1
                self.expected("graph, cluster, plan, microbatching, program or note")
        if same_at is not None:
            if "graph" not in parts:
                self.fail("'same graph' needs a graph in the file", same_at)
            parts["microbatching"] = dataclasses.replace(
                parts["microbatching"], graph=parts["graph"]
            )
        return Bundle(**parts, notes=tuple(notes))

    def foreign_part(self, read: Any) -> Any:
        """Reads TOML or JSON behind bars, so that its errors have this file's lines."""
        self.expect("{")
        text, before = self.foreign()
        self.expect("}", "after the lines behind bars")
        return read("\n" * before + text, self.filename)

    def microbatching(self) -> tuple[Microbatching, int | None]:
        """Returns it and, where it says `same graph`, the position of those words."""
        count = self.integer("how many microbatches")
        self.expect("{")
        types: list[BatchType] = []
        marked: dict[str, set[int]] = {"hoisted": set(), "resliced": set(), "positions": set()}
        chained: list[tuple[int, int]] = []
        refusal = None
        accepted = False
        graph: Graph | None = None
        same_at = None
        while not self.take("}"):
            if self.take("types"):
                while self.at_name() and self.peek() not in _MICROBATCHING_WORDS:
                    types.extend(self.batch_types())
            elif self.peek() in marked:
                word = self.peek()
                self.at += 1
                while self.peek().startswith("%"):
                    marked[word].add(self.ref("a value"))
            elif self.take("chained"):
                while self.take("("):
                    given = self.ref("a value")
                    self.expect(",", "between the two values")
                    chained.append((given, self.ref("a value")))
                    self.expect(")")
            elif self.take("refused"):
                reason = self.string("the reason")
                op = self.optional("op", "the position of an op")
                refusal = Refusal(
                    reason,
                    op,
                    self.string("the primitive"),
                    self.string("the module path"),
                    self.string("the source line"),
                )
            elif self.take("accepted"):
                accepted = True
            elif self.take("same"):
                same_at = self.at - 1
                self.expect("graph")
            elif self.take("graph"):
                graph = self.graph()
            else:
                self.expected(
                    "types, hoisted, resliced, positions, chained, refused, accepted, 'same graph', graph or '}'"
                )
        if (graph is None) == (same_at is None):
            self.fail("microbatching holds a graph or the words 'same graph'", self.at - 1)
        if graph is None:
            graph = Graph("", (), (), (), ())
        found = Microbatching(
            count,
            graph,
            tuple(types),
            hoisted=frozenset(marked["hoisted"]),
            positions=frozenset(marked["positions"]),
            refusal=refusal,
            accepted=accepted,
            chained=tuple(chained),
            resliced=frozenset(marked["resliced"]),
        )
        return found, same_at

    def batch_types(self) -> list[BatchType]:
        """Steps over "B(0)^-1*12"."""
        kind = self.name("a batch type")
        axis = None
        power = 0
        if self.take("("):
            axis = self.integer("the batch axis")
            self.expect(")")
        if self.take("^"):
            power = self.integer("the power")
        count = 1
        if self.take("*"):
            count = self.integer("how many")
            if not 0 < count <= _MAX_RUN:
                self.fail(f"a run holds 1 to {_MAX_RUN} values", self.at - 1)
        return [BatchType(kind, power, axis)] * count
