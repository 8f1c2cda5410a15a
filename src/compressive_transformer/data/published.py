"""Published data sets, recognized by their counts: only results on exactly these splits compare with papers."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """One split of a published data set; 0 where a count was not published."""

    name: str
    split: str
    documents: int
    words: int = 0
    bytes: int = 0
    vocab_size: int = 0
    """Ids with `start`, for data that comes with its vocabulary."""


SPLITS_OF_PAPERS = (
    Published("PG-19", "train", 28_602, words=1_973_136_207),
    Published("PG-19", "validation", 50, words=3_007_061),
    Published("PG-19", "test", 100, words=6_966_499),
    Published("Enwik8", "train", 1, bytes=90_000_000),
    Published("Enwik8", "validation", 1, bytes=5_000_000),
    Published("Enwik8", "test", 1, bytes=5_000_000),
    # One <eos> a line is counted; validation and test differ between the two only in what is <unk>.
    Published("WikiText-103", "train", 1, words=103_227_021, vocab_size=267_736),
    Published("WikiText-103", "validation", 1, words=217_646, vocab_size=267_736),
    Published("WikiText-103", "test", 1, words=245_569, vocab_size=267_736),
    Published("WikiText-2", "train", 1, words=2_088_628, vocab_size=33_279),
    Published("WikiText-2", "validation", 1, words=217_646, vocab_size=33_279),
    Published("WikiText-2", "test", 1, words=245_569, vocab_size=33_279),
)


def published_name(benchmark: str, split: str, *, documents: int, words: int, bytes: int, vocab_size: int) -> str:
    """Return the published data set of a complete split of `benchmark`, "" where its counts differ."""
    for known in SPLITS_OF_PAPERS:
        counts = {known.words: words, known.bytes: bytes, known.vocab_size: vocab_size}
        same = all(count == published for published, count in counts.items() if published)
        if (
            benchmark
            and known.name.startswith(benchmark)
            and (known.split, known.documents) == (split, documents)
            and same
        ):
            return known.name
    return ""
