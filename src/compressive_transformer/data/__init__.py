"""From text to tokens on disk, and from there to the lanes of a batch.

A corpus is a folder: `tokenizer.json`, one `.bin` file of tokens per split, and `documents.json`, the index. `sources`
reads documents, `prepare` writes the folder, `corpus` opens it, `lanes` reads it segment by segment.
"""

from .corpus import Corpus, Document, Split, open_corpus
from .lanes import Segment, lanes
from .prepare import prepare

__all__ = ["Corpus", "Document", "Segment", "Split", "lanes", "open_corpus", "prepare"]
