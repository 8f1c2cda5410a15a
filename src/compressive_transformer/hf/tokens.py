"""The tokenizer of a run in the form that `AutoTokenizer` loads."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, MuLawTokenizer, Tokenizer
from ..data.tokenizers.hugging_face import BYTE_LETTERS
from ..errors import CompressiveError

START = "<|start|>"
"""Text of the start id."""


def to_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers with the same ids, which puts the start id before a text and pads on the left.

    Text that looks like a special token is encoded as text, as everywhere in the package.

    Args:
        tokenizer: Tokenizer of a run.

    Raises:
        CompressiveError: It is for words or sound, for which the library tokenizers has no lossless form, or it already
            has a token of the text `<|start|>`.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    elif isinstance(tokenizer, ByteTokenizer) and not isinstance(tokenizer, MuLawTokenizer):
        library = _bytes()
    else:
        raise CompressiveError(
            f"the run's tokenizer ({type(tokenizer).__name__}) has no form in the library tokenizers; export a run on "
            "bytes, bpe or a Hugging Face tokenizer"
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
    """Return bytes as tokens in the library tokenizers: a byte-level BPE without merges, id = byte."""
    library = tokenizers.Tokenizer(
        models.BPE(vocab={letter: byte for byte, letter in enumerate(BYTE_LETTERS)}, merges=[])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return library


def _with_start(library: tokenizers.Tokenizer, start: int) -> tokenizers.Tokenizer:
    """Return the tokenizer with the start id as an additional special token."""
    description = json.loads(library.to_str())
    token = {"id": start, "content": START, "special": True, "normalized": False}
    description["added_tokens"].append({**token, "single_word": False, "lstrip": False, "rstrip": False})
    try:
        changed = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the Rust library raises nothing more specific
        raise CompressiveError(f"the tokenizer refuses the token {START}: {error}") from error
    if changed.token_to_id(START) != start:
        raise CompressiveError(
            f"the tokenizer cannot give {START} the start id {start}: it already has such a token, or ids without a "
            "token; export a run on another tokenizer"
        )
    return changed
