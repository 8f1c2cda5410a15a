"""Stream: read, score and write text of any length with one memory, at a constant cost per token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from .checkpoint import load_tensors, save_tensors
from .decoding import CachedDecoder, Precision, check_precision
from .embedding import token_nats
from .errors import CompressiveError
from .keeping import belongs_to, require_same
from .memory import Memory
from .model import CompressiveTransformer
from .tokenizer import ByteTokenizer, Tokenizer


class Stream:
    """One lane of text that a model reads and writes, a document from its beginning.

    What was read and written stays in memory as the model's config says; `memory` can be kept and set back, to read on
    from there, and `save` keeps all of a stream in a file.

    Text is read in segments by the model and written token by token by a `CachedDecoder`, which packs the weights
    when the stream first writes: of a model that has changed since, make a new stream.
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
        tensors = self.memory.state_dict()
        if self._logits is not None:
            tensors["logits"] = self._logits
        save_tensors(Path(path), tensors, metadata=belongs_to(self.model, self.tokenizer))

    @classmethod
    def load(
        cls, path: str | Path, model: CompressiveTransformer, tokenizer: Tokenizer, precision: Precision = "full"
    ) -> Self:
        """The stream that `save` wrote, with the model and the tokenizer that it had then.

        Raises CompressiveError where the file is missing or damaged, or belongs to another config, other weights
        or another tokenizer.
        """
        path, stream = Path(path), cls(model, tokenizer, precision)
        require_same(path, model, tokenizer)
        tensors = load_tensors(path)
        logits = tensors.pop("logits", None)
        like = model.embedding.weight
        try:
            memory = Memory.from_state_dict(tensors).to(like.device)
            model.check_memory(memory, 1)
        except CompressiveError as error:
            raise CompressiveError(f"{path}: damaged: {error}") from None
        if logits is not None and logits.shape != (tokenizer.vocab_size,):
            raise CompressiveError(f"{path}: damaged: it must hold logits [vocab_size = {tokenizer.vocab_size}]")
        stream.memory = memory
        stream._logits = None if logits is None else logits.to(like.device)
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
        _check_sampling(tokens, temperature, top_k, top_p, seed, stop)
        texts = self._texts(tokens, temperature, top_k, top_p, seed)
        return texts if stop is None else _until(texts, stop)

    def _texts(self, tokens: int, temperature: float, top_k: int, top_p: float, seed: int | None) -> Iterator[str]:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        decoder = self.tokenizer.decoder()
        self._begin()
        for _ in range(tokens):
            logits = self._expected().double().cpu()
            logits[self.tokenizer.start] = float("-inf")  # stands before documents, never inside
            token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
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
        output = self.model(tokens[None].to(device), self.memory)
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


def sample(logits: Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """A token id drawn from `logits [vocab_size]`, as `Stream.write` describes."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax((logits - logits.max()) / temperature, dim=0).sort(
        descending=True, stable=True
    )
    if top_k:
        probabilities[top_k:] = 0
    # A token stays while those before it have not reached top_p; the likeliest always stays.
    before = probabilities.cumsum(0) - probabilities
    probabilities[before >= top_p * probabilities.sum()] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def _until(texts: Iterator[str], stop: str) -> Iterator[str]:
    """The texts up to the first place of `stop`, never giving out a beginning of it too early."""
    held = ""
    for text in texts:
        held += text
        if (place := held.find(stop)) >= 0:
            yield held[:place]
            return
        keep = next((size for size in range(len(stop) - 1, 0, -1) if held.endswith(stop[:size])), 0)
        if ready := held[: len(held) - keep]:
            yield ready
        held = held[len(held) - keep :]
    if held:
        yield held


def _check_sampling(
    tokens: int, temperature: float, top_k: int, top_p: float, seed: int | None, stop: str | None
) -> None:
    if tokens < 1:
        raise CompressiveError(f"tokens ({tokens}) must be 1 or more")
    if not 0 <= temperature < float("inf"):
        raise CompressiveError(f"temperature ({temperature}) must be 0 (the likeliest token) or more")
    if top_k < 0:
        raise CompressiveError(f"top_k ({top_k}) must be 0 (all tokens) or more")
    if not 0 < top_p <= 1:
        raise CompressiveError(f"top_p ({top_p}) must be more than 0 and at most 1 (all tokens)")
    if seed is not None and not 0 <= seed < 2**63:
        raise CompressiveError(f"seed ({seed}) must be 0 or more, and less than 2**63")
    if stop == "":
        raise CompressiveError("stop must hold at least one character; leave it out to stop after `tokens`")
