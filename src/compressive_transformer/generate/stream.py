"""Stream: read, score and generate text of any length with one memory, at a constant cost per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..attention.positions import PositionCache
from ..data.tokenizers import Tokenizer
from ..errors import CompressiveError
from ..memory import Memory
from ..model import CompressiveTransformer, evaluation_mode
from ..model.embedding import token_nats
from .decoder import CachedDecoder
from .packed import Precision, check_precision
from .sampling import DEFAULT_SAMPLING, Sampling
from .stream_state import StreamState, fingerprint


class Stream:
    """One document that a model reads and continues, from its start.

    Text is read a segment at a time by the model, and generated token by token by a `CachedDecoder`. Weights are copied
    when the stream first generates: create a new stream when the model has changed. The model may be in training mode;
    nothing is dropped out while a stream uses it.

    Args:
        model: The model.
        tokenizer: The tokenizer that the model was trained with.
        precision: Precision of the weights while generating: "full" as the model has them, "bf16" or "int8" (CPU only)
            rounded, which is faster and changes the text.

    Raises:
        CompressiveError: The tokenizer is not the model's, the precision is unknown, or "int8" off the CPU.

    Example:
        >>> stream = ct.Stream(*ct.load("run"))
        >>> stream.read("It was a dark and stormy night; ")
        >>> stream.write(200, temperature=0.8, seed=1)
    """

    def __init__(self, model: CompressiveTransformer, tokenizer: Tokenizer, precision: Precision = "full") -> None:
        if tokenizer.vocab_size != model.config.vocab_size:
            raise CompressiveError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}; "
                "use the tokenizer that the model was trained with"
            )
        check_precision(precision, model.embedding.weight.device)
        self.model = model
        self.tokenizer = tokenizer
        self.precision = precision
        self._position_cache = PositionCache()
        self._decoder: CachedDecoder | None = None
        self._state: StreamState | None = StreamState.start(model)  # None while the decoder is ahead
        self._decoded: StreamState | None = None  # the state that the decoder has, None while it is ahead
        self._logits: Tensor | None = None  # of the next token

    @property
    def state(self) -> StreamState:
        """Memory and next-token logits: all that later reading and generation depend on.

        It can be assigned, which raises CompressiveError for the memory of another model.
        """
        if self._state is None:
            assert self._decoder is not None
            self._state = self._decoded = StreamState(self._decoder.memory, self._logits)
        return self._state

    @state.setter
    def state(self, state: StreamState) -> None:
        self.model.check_memory(state.memory, 1)
        self._state, self._logits = state, state.logits

    @property
    def memory(self) -> Memory:
        """Memory, one lane. It has no next-token logits: after assigning it, call `read` before anything else."""
        return self.state.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self.state = StreamState(memory)

    def read(self, text: str | bytes) -> None:
        """Read text into memory.

        Args:
            text: The text; bytes, which need not be UTF-8, where tokens are bytes.

        Raises:
            CompressiveError: The tokenizer cannot encode the text.
        """
        for chunk in self._chunks(self.encode(text)):
            self._read(chunk)

    def score(self, text: str | bytes) -> Tensor:
        """Read text into memory and return how surprising it was.

        Args:
            text: The text; bytes, which need not be UTF-8, where tokens are bytes.

        Returns:
            Nats of each token, -ln p(token | all before), `[tokens]`, float64 on the CPU.

        Raises:
            CompressiveError: The tokenizer cannot encode the text, or `memory` was assigned and nothing read since.
        """
        return self.score_tokens(self.encode(text))

    def score_tokens(self, tokens: Tensor) -> Tensor:
        """Return the nats of `tokens [tokens]`, ids that `encode` returned, as `score` does."""
        nats = [torch.zeros(0, dtype=torch.float64)]
        for chunk in self._chunks(tokens):
            logits = torch.cat([self._next_logits()[None], self._read(chunk)[:-1]])
            nats.append(token_nats(logits[None], chunk[None].to(logits.device))[0].cpu())
        return torch.cat(nats)

    def encode(self, text: str | bytes) -> Tensor:
        """Return the token ids of a text, `[tokens]`. Raises CompressiveError if the tokenizer cannot encode it."""
        return torch.as_tensor(self.tokenizer.encode(text), dtype=torch.int64)

    def write(self, tokens: int, sampling: Sampling = DEFAULT_SAMPLING, **options: Any) -> str:
        """Generate text that continues what was read. It is part of the document, as if it had been read.

        Args:
            tokens: Number of tokens to generate.
            sampling: How tokens are chosen, and where the text ends early.
            **options: Fields of `Sampling` that differ from `sampling`: `write(200, temperature=0.8, stop="\\n")`.

        Returns:
            The text, without the stop string; the model has read that, too.

        Raises:
            CompressiveError: A value is out of range, or `memory` was assigned and nothing read since.
        """
        return "".join(self.iter_text(tokens, sampling, **options))

    def iter_text(self, tokens: int, sampling: Sampling = DEFAULT_SAMPLING, **options: Any) -> Iterator[str]:
        """Return an iterator over the text of `write`, as it is generated. It takes and raises the same."""
        sampling = replace(sampling, **options)
        if tokens < 1:
            raise CompressiveError(f"tokens ({tokens}) must be 1 or more")
        return sampling.until_stop(self._iter_text(tokens, sampling))

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file atomically; `load` continues as if the stream had never stopped.

        Raises:
            CompressiveError: The file cannot be written.
        """
        self.state.save(Path(path), fingerprint(self.model, self.tokenizer))

    @classmethod
    def load(
        cls, path: str | Path, model: CompressiveTransformer, tokenizer: Tokenizer, precision: Precision = "full"
    ) -> Self:
        """Return the stream that `save` wrote.

        Args:
            path: The file.
            model: The same model.
            tokenizer: The same tokenizer.
            precision: Precision of the weights while generating, which may be another one.

        Raises:
            CompressiveError: The file is missing or damaged, or was saved with another config, other weights or
                another tokenizer.
        """
        stream = cls(model, tokenizer, precision)
        stream.state = StreamState.load(Path(path), model, fingerprint(model, tokenizer))
        return stream

    def _iter_text(self, tokens: int, sampling: Sampling) -> Iterator[str]:
        sampler, decoder = sampling.sampler(self.tokenizer.start), self.tokenizer.decoder()
        self._start()
        for _ in range(tokens):
            token = sampler(self._next_logits())
            self._step(token)
            if text := decoder(token):
                yield text
        if text := decoder.flush():
            yield text

    def _chunks(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield `tokens` a segment at a time, so that a book needs no more room than a page."""
        self._start()
        yield from (chunk for chunk in tokens.split(self.model.config.segment_length) if len(chunk))

    def _start(self) -> None:
        """Read the start of the document, if nothing was read yet."""
        if self._logits is None and not self.state.seen:
            self._read(torch.tensor([self.tokenizer.start]))

    def _next_logits(self) -> Tensor:
        """Return the logits of the next token, `[vocab_size]`."""
        if self._logits is None:
            raise CompressiveError("no next-token logits after assigning `memory`: call `read()` first")
        return self._logits

    @torch.no_grad()
    def _read(self, tokens: Tensor) -> Tensor:
        """Read `tokens [chunk]`; return the logits after each, `[chunk, vocab_size]`."""
        device = self.model.embedding.weight.device
        with evaluation_mode(self.model):
            output = self.model(tokens[None].to(device), self.memory, position_cache=self._position_cache)
        logits: Tensor = output.logits[0]
        self._logits = logits[-1].clone()
        self._state = StreamState(output.memory, self._logits)
        return logits

    def _step(self, token: int) -> None:
        """Read one token with the decoder."""
        if self._decoder is None:
            self._decoder = CachedDecoder(self.model, self.memory, self.precision)
        elif self._decoded is not self._state:
            self._decoder.restart(self.memory)
        device = self.model.embedding.weight.device
        self._logits = self._decoder.step(torch.tensor([token], device=device))[0]
        self._state = self._decoded = None
