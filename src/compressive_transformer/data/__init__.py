"""Text to tokens on disk: files or a dataset become documents, their tokens, borders, words and bytes.

A corpus is a folder: `tokenizer.json`, one `.bin` file of tokens a split, and `documents.json`, the index.
`sources` finds and reads the text, `writing` makes the folder, `reading` opens it.
"""

from .corpus import Corpus, Document, Split, open_corpus
from .prepare import prepare

__all__ = ["Corpus", "Document", "Split", "open_corpus", "prepare"]
