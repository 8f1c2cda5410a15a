"""Stream: read, score and write text of any length with one memory, at a constant cost per token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ..attention.positions import PositionCache
from ..data.tokenizers import ByteTokenizer, Tokenizer
from ..errors import CompressiveError
from ..memory import Memory
from ..model import CompressiveTransformer
from ..model.embedding import token_nats
from .decoder import CachedDecoder
from .packed import Precision, check_precision
from .sampling import Sampling, require_tokens
from .stream_file import belongs_to, read_state, write_state


class Stream:
    """One lane of text that a model reads and writes, a document from its beginning.

    What was read and written stays in memory as the model's config says; `memory` can be kept and set back, to read on
    from there, and `save` keeps all of a stream in a file.

    Text is read in segments by the model, whose projected distances are kept, and written token by token by a
    `CachedDecoder`, which packs the weights when the stream first writes: of a model that has changed since, make a
    new stream.
    """

    def __init__(self, model: CompressiveTransformer, tokenizer: Tokenizer, precision: Precision = "full") -> None:
        """A stream at the start of a document.

        precision: that of the weights while writing: "full" as the model has them, "bf16" or "int8" rounded, which
        is faster and changes what is written. Raises CompressiveError for another one, for "int8" off the CPU, and
        for a tokenizer that is not the model's.
        """
        if tokenizer.vocab_size != model.config.vocab_size:
            raise CompressiveError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}; "
                "use the tokenizer that the model was trained with"
            )
        check_precision(precision, model.embedding.weight.device)
        self.model = model
        self.tokenizer = tokenizer
        self.precision = precision
        self._memory: Memory | None = model.empty_memory(1)  # None while the decoder is ahead of it
        self._distances = PositionCache()
        self._decoder: CachedDecoder | None = None
        self._behind = False  # the decoder, of what was read since it stepped
        self._logits: Tensor | None = None  # of the next token; None before the document's start was read

    @property
    def memory(self) -> Memory:
        """What the stream remembers, one lane."""
        if self._memory is None:
            assert self._decoder is not None
            self._memory = self._decoder.memory
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        # Memory has no logits: what comes next is known again once something was read.
        self._memory, self._behind, self._logits = memory, True, None

    def read(self, text: str | bytes) -> None:
        """Take `text` in. Raises CompressiveError for text that the tokenizer cannot hold.

        Bytes as they are can be read where tokens are bytes.
        """
        for piece in self._begun(self.encode(text)):
            self._feed(piece)

    def score(self, text: str | bytes) -> Tensor:
        """Take `text` in, and give the nats `[tokens]` of its tokens, -ln p(token | all before), in double precision.

        Raises CompressiveError as `read` does, and where memory was set and nothing read since.
        """
        return self.score_tokens(self.encode(text))

    def score_tokens(self, tokens: Tensor) -> Tensor:
        """What `score` gives, for `tokens [tokens]` of `encode`."""
        nats = [torch.zeros(0, dtype=torch.float64)]
        for piece in self._begun(tokens):
            logits = torch.cat([self._expected()[None], self._feed(piece)[:-1]])
            nats.append(token_nats(logits[None], piece[None].to(logits.device))[0].cpu())
        return torch.cat(nats)

    def encode(self, text: str | bytes) -> Tensor:
        """The ids `[tokens]` as which `text` is read. Raises CompressiveError as `read` does."""
        if isinstance(text, str):
            ids = self.tokenizer.encode(text)
        else:
            if not isinstance(self.tokenizer, ByteTokenizer):
                raise CompressiveError("bytes are read only by a model whose tokens are bytes; decode them first")
            ids = self.tokenizer.encode(text)
        return torch.as_tensor(ids, dtype=torch.int64)

    def save(self, path: str | Path) -> None:
        """Write what `Stream.load` needs to go on as if the stream had never stopped, the whole file or none.

        It is a safetensors file: memory, and the logits of the next token. Raises CompressiveError where it cannot
        be written.
        """
        write_state(Path(path), self.memory, self._logits, belongs_to(self.model, self.tokenizer))

    @classmethod
    def load(
        cls, path: str | Path, model: CompressiveTransformer, tokenizer: Tokenizer, precision: Precision = "full"
    ) -> Self:
        """The stream that `save` wrote, with the model and the tokenizer that it had then.

        Raises CompressiveError where the file is missing or damaged, or belongs to another config, other weights
        or another tokenizer.
        """
        stream = cls(model, tokenizer, precision)
        stream.memory, stream._logits = read_state(Path(path), model, belongs_to(model, tokenizer))
        return stream

    def write(
        self,
        tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | None = None,
    ) -> str:
        """Text that goes on from what was read, `tokens` tokens or up to `stop`, which is left out.

        Raises CompressiveError where memory was set and nothing read since.

        temperature: 0 takes the likeliest token, 1 samples from the model's own distribution.
        top_k: sample among the k likeliest tokens only; 0 for all.
        top_p: sample among the fewest tokens that have this probability together, in (0, 1].
        seed: the same seed after the same reading gives the same text; None for another each time.
        stop: end before this text appears; the model has then read it all the same.
        """
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "stop": stop}
        return "".join(self.pieces(tokens, **sampling))  # type: ignore[arg-type]

    def pieces(
        self,
        tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | None = None,
    ) -> Iterator[str]:
        """What `write` gives, piece by piece as it is produced."""
        sampling = Sampling(temperature, top_k, top_p, seed, () if stop is None else (stop,))
        require_tokens(tokens)
        return sampling.until_stop(self._texts(tokens, sampling))

    def _texts(self, tokens: int, sampling: Sampling) -> Iterator[str]:
        sampler, decoder = sampling.sampler(self.tokenizer.start), self.tokenizer.decoder()
        self._begin()
        for _ in range(tokens):
            token = sampler(self._expected())
            self._step(token)
            if text := decoder(token):
                yield text
        if text := decoder.flush():
            yield text

    def _begun(self, tokens: Tensor) -> Iterator[Tensor]:
        """`tokens` a segment at a time, so that a book needs no more room than a page; the start is read before."""
        self._begin()
        for piece in tokens.split(self.model.config.segment_length):
            if len(piece):
                yield piece

    def _begin(self) -> None:
        """Read the start of a document, where nothing was read yet."""
        if self._logits is None and not int(self.memory.seen):
            self._feed(torch.tensor([self.tokenizer.start]))

    def _expected(self) -> Tensor:
        """Logits `[vocab_size]` of the next token."""
        if self._logits is None:
            raise CompressiveError("memory was set, and what comes next is not part of it: read something first")
        return self._logits

    @torch.no_grad()
    def _feed(self, tokens: Tensor) -> Tensor:
        """Read `tokens [chunk]`; logits `[chunk, vocab_size]` after each."""
        training = self.model.training
        self.model.eval()
        device = self.model.embedding.weight.device
        output = self.model(tokens[None].to(device), self.memory, position_cache=self._distances)
        self.model.train(training)
        logits: Tensor = output.logits[0]
        self.memory = output.memory
        self._logits = logits[-1]
        return logits

    def _step(self, token: int) -> None:
        if self._decoder is None:
            self._decoder = CachedDecoder(self.model, self.memory, self.precision)
        elif self._behind:
            self._decoder.restart(self.memory)
        device = self.model.embedding.weight.device
        self._logits = self._decoder.step(torch.tensor([token], device=device))[0]
        self._memory, self._behind = None, False
