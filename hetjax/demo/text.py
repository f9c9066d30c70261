"""Real text that needs no download: the help topics that Python's own `help()` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as characters.

    Attributes:
      alphabet: the characters that occur; a token is a position in it.
      train, held_out: `[num_tokens]` int32; the last tenth of the text is held out.
    """

    alphabet: str
    train: np.ndarray
    held_out: np.ndarray

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet)

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(self.alphabet[int(t)] for t in tokens)


def load_corpus() -> Corpus:
    """Returns the help topics of this Python, about 0.5 million characters.

    Raises:
      RuntimeError: this Python was built without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text that the demo trains on; "
            "install the full standard library (Debian: libpython3-stdlib)"
        ) from None
    text = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    position = {c: i for i, c in enumerate(alphabet)}
    tokens = np.fromiter((position[c] for c in text), np.int32, len(text))
    split = len(tokens) * 9 // 10
    return Corpus(alphabet, tokens[:split], tokens[split:])


def batches(tokens: np.ndarray, batch_size: int, length: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of windows drawn at random, forever: {"tokens", "targets"}, `[batch_size, length]` int32."""
    rng = np.random.default_rng(seed)
    offsets = np.arange(length + 1)
    while True:
        starts = rng.integers(0, len(tokens) - length, batch_size)
        window = tokens[starts[:, None] + offsets]
        yield {"tokens": window[:, :-1], "targets": window[:, 1:]}
