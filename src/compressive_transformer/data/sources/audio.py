"""Sound: WAV files to bytes of µ-law and back."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CompressiveError
from ..corpus import SPLITS
from ..tokenizers import mu_law_decode, mu_law_encode
from .source import WHOLE, RawDocument, Source


def audio(folder: Path, holdout: int) -> Source:
    """Return the `*.wav` files of a folder, at any depth, or of its sub-folders train, validation and test.

    Each is a document of one byte per sample, its channels mixed to one. Raises CompressiveError where there are none,
    or where their rates differ.
    """
    parts = {name: folder / name for name in SPLITS if (folder / name).is_dir()}
    if parts and "train" not in parts:
        raise CompressiveError(f"{folder} has {', '.join(parts)} but no train: add it or rename")
    files = {name: sorted(part.rglob("*.wav"), key=Path.as_posix) for name, part in (parts or {WHOLE: folder}).items()}
    rates = {_open(file)[0]: file for part in files.values() for file in part}
    if not rates:
        raise CompressiveError(f"{folder} has no *.wav files: convert other formats to WAV")
    if len(rates) > 1:
        (rate, file), (second_rate, second) = list(rates.items())[:2]
        raise CompressiveError(
            f"{file} has {rate} samples per second, {second} has {second_rate}: resample all to one rate, or prepare"
            " them separately"
        )
    rate = next(iter(rates))
    return Source(
        f"audio:{folder.resolve().name}",
        {name: partial(_read_files, part) for name, part in files.items()},
        holdout,
        reading=f"sound of {rate:,} samples a second in 8-bit µ-law, channels mixed to one",
        tokenizer="mu-law",
        rate=rate,
        files=tuple(file for part in files.values() for file in part),
    )


def _read_files(files: Iterable[Path]) -> Iterator[RawDocument]:
    for file in files:
        content = mu_law_encode(read_wav(file)[1]).tobytes()
        if not content:
            raise CompressiveError(f"{file} is empty: take it out, a document must have samples")
        yield RawDocument(file.stem, content, str(file), words=0, read=file.stat().st_size)


def read_wav(path: Path) -> tuple[int, NDArray[np.float64]]:
    """Return the samples per second, and the samples `[samples]` in [-1, 1], the mean of all channels.

    Raises CompressiveError for anything but a WAV file of 8, 16, 24 or 32-bit PCM.
    """
    rate, channels, width, content = _open(path, samples=True)
    return rate, _samples(content, width).reshape(-1, channels).mean(axis=1)


def wav_of(levels: NDArray[Any], rate: int) -> bytes:
    """Return a 16-bit WAV file of µ-law levels `[samples]`, at `rate` samples per second."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(mu_law_decode(levels) * (2**15 - 1)).astype("<i2").tobytes())
    return content.getvalue()


def _open(path: Path, *, samples: bool = False) -> tuple[int, int, int, bytes]:
    """Return samples per second, channels, bytes per sample and, with `samples`, the content of a WAV file."""
    try:
        with wave.open(str(path), "rb") as file:
            content = file.readframes(file.getnframes()) if samples else b""
            return file.getframerate(), file.getnchannels(), file.getsampwidth(), content
    except OSError as error:
        raise CompressiveError(f"cannot read {path}: {error.strerror}") from error
    except (wave.Error, EOFError) as error:
        raise CompressiveError(f"{path} is not a WAV file of integers (PCM): {error or 'it ends early'}") from error


def _samples(content: bytes, width: int) -> NDArray[np.float64]:
    """Return samples in [-1, 1] of little-endian integers of `width` bytes, unsigned where that is 1."""
    if width == 1:
        return (np.frombuffer(content, dtype=np.uint8).astype(np.float64) - 128) / 128
    # Into the upper bytes of 32 bits, so that one scale serves all widths.
    wide = np.zeros((len(content) // width, 4), dtype=np.uint8)
    wide[:, 4 - width :] = np.frombuffer(content, dtype=np.uint8).reshape(-1, width)
    samples: NDArray[np.float64] = wide.view("<i4")[:, 0] / 2.0**31
    return samples
