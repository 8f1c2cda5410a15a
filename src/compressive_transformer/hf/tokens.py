"""A run's tokenizer as `AutoTokenizer` loads it."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, MuLawTokenizer, Tokenizer
from ..data.tokenizers.hugging_face import BYTE_LETTERS
from ..errors import CompressiveError

START = "<|start|>"
"""How the start id is written."""


def to_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same ids in a tokenizer of transformers, which puts the start id before a text and pads on the left.

    Texts are texts: what looks like a special token in one is encoded as any other characters, as everywhere in the
    package. Raises CompressiveError for words and sound, which the library tokenizers has no lossless form for.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    elif isinstance(tokenizer, ByteTokenizer) and not isinstance(tokenizer, MuLawTokenizer):
        library = _bytes()
    else:
        raise CompressiveError(
            f"the run's tokenizer ({type(tokenizer).__name__}) has no form in the library tokenizers; an export needs "
            "a run on bytes, bpe or a Hugging Face tokenizer"
        )
    library = _with_start(library, tokenizer.start)
    library.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A $B", special_tokens=[(START, tokenizer.start)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=library,
        bos_token=START,
        eos_token=START,
        pad_token=START,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _bytes() -> tokenizers.Tokenizer:
    """Bytes as tokens in the library tokenizers: a byte-level BPE that has learnt nothing, id = byte."""
    library = tokenizers.Tokenizer(
        models.BPE(vocab={letter: byte for byte, letter in enumerate(BYTE_LETTERS)}, merges=[])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return library


def _with_start(library: tokenizers.Tokenizer, start: int) -> tokenizers.Tokenizer:
    """The same tokenizer with the start id as one more special token. Raises CompressiveError where it takes none."""
    description = json.loads(library.to_str())
    token = {"id": start, "content": START, "special": True, "normalized": False}
    description["added_tokens"].append({**token, "single_word": False, "lstrip": False, "rstrip": False})
    try:
        changed = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the Rust library raises nothing more specific
        raise CompressiveError(f"the tokenizer takes no token {START}: {error}") from error
    if changed.token_to_id(START) != start:
        raise CompressiveError(
            f"the tokenizer takes no token {START} with the id {start} of the start: it has one already, or ids that "
            "no token has; export a run on another tokenizer"
        )
    return changed
