"""The command `generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, UseAppendAction

from ..data.sources.audio import read_wav, wav_of
from ..data.tokenizers import MuLawTokenizer, mu_law_encode
from ..errors import CompressiveError
from ..generate import Precision, Sampling, Stream
from ..generate.sampling import DEFAULT_SAMPLING
from ._common import RunArgument, checked, load_model


def generate(
    run: RunArgument,
    /,
    prompt: Path | None = None,
    tokens: int = 200,
    sampling: OmitArgPrefixes[Annotated[UseAppendAction[Sampling], checked(Sampling)]] = DEFAULT_SAMPLING,
    precision: Precision = "full",
) -> None:
    """Generate text that continues a prompt, printed token by token.

    A model of sound writes a WAV file: compressive generate RUN --tokens 16000 > sound.wav

    Args:
        run: Run from `compressive train`.
        prompt: File with the prompt, or "-" for standard input; by default a new document begins. A .wav file for a
            model of sound.
        tokens: Number of tokens to generate.
        sampling: Choice of the next token, and stop strings.
        precision: Precision of the weights; bf16 and int8 (CPU only) are faster and change the text.
    """
    model, tokenizer = load_model(run)
    stream = Stream(model, tokenizer, precision)
    if isinstance(tokenizer, MuLawTokenizer) and sys.stdout.isatty():
        raise CompressiveError(f"{run} writes sound: send it to a file, compressive generate {run} > sound.wav")
    if prompt is not None:
        stream.read(_read_sound(prompt, tokenizer) if isinstance(tokenizer, MuLawTokenizer) else _read_text(prompt))
    texts = stream.iter_text(tokens, sampling)
    if isinstance(tokenizer, MuLawTokenizer):
        sys.stdout.buffer.write(wav_of(tokenizer.encode("".join(texts)), tokenizer.rate))
        return
    for text in texts:
        print(text, end="", flush=True)
    print()


def _read_sound(path: Path, tokenizer: MuLawTokenizer) -> str:
    rate, samples = read_wav(path)
    if rate != tokenizer.rate:
        raise CompressiveError(f"{path} has {rate} samples a second, the run's data {tokenizer.rate}: convert it first")
    return tokenizer.decode(mu_law_encode(samples))


def _read_text(path: Path) -> str:
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CompressiveError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as corpora are read
