"""The model of transformers: the package's own model with `generate`, `labels`, and a cache in the place of memory."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ..errors import CompressiveError
from ..generate import has_plain_layers
from ..memory import Memory
from ..model import CompressiveTransformer, Output, next_token_loss
from ..model.embedding import IGNORE_INDEX
from .cache import CompressiveTransformerCache
from .configuration import CompressiveTransformerConfig

# transformers 5.24 renamed `past_key_values` to `cache`; both are taken here, and it is given what it asks for.
_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _PARAMETERS else "past_key_values"


@dataclass
class CompressiveTransformerOutput(CausalLMOutputWithPast):  # type: ignore[misc]
    """What transformers' causal language models give, and the compression loss."""

    compression_loss: Tensor | None = None
    """Scalar, summed over layers, the mean over the segments that were read; reaches compression functions only."""


class CompressiveTransformerForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A Compressive Transformer that transformers can load, save, train and generate with.

    `model` is the package's own model. A text is read the same in whatever chunks it comes, and padding that
    `attention_mask` marks never enters memory: each row is read as if it were alone.
    """

    config_class = CompressiveTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ("CompressiveTransformer",)  # memory is read and written on one device

    def __init__(self, config: CompressiveTransformerConfig) -> None:
        super().__init__(config)
        self.model = CompressiveTransformer(config.to_core())
        self.post_init()
        # The start id stands before documents, never inside; no loss has ever trained its logit.
        self.generation_config.suppress_tokens = [config.bos_token_id]

    @classmethod
    def of(cls, model: CompressiveTransformer) -> Self:
        """The package's own model in this form; the parameters are shared, not copied."""
        with torch.device("meta"):
            wrapped = cls(CompressiveTransformerConfig.of(model.config))
        wrapped.model = model
        wrapped.config.dtype = model.embedding.weight.dtype
        wrapped.train(model.training)
        return wrapped

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, from safetensors only.

        Raises CompressiveError where parameters are missing, which transformers would make up.
        """
        if kwargs.get("use_safetensors") is False:
            raise CompressiveError("pickled weights are never loaded, since they can run code; expected safetensors")
        told = kwargs.pop("output_loading_info", False)
        kwargs.update(use_safetensors=True, output_loading_info=True)
        model, information = super().from_pretrained(*args, **kwargs)
        if missing := sorted(information["missing_keys"]):
            raise CompressiveError(f"parameter {missing[0]!r} is missing; the weights belong to another model")
        return (model, information) if told else model

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: CompressiveTransformerCache | None = None,
        cache: CompressiveTransformerCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CompressiveTransformerOutput:
        """Logits `[batch, columns, vocab_size]` of `input_ids [batch, columns]`, and the cache after them.

        attention_mask: `[batch, columns or more]`, 0 where there is padding, on either side; of more columns the last
            ones count. Logits of padding are undefined.
        past_key_values, cache: two names of one thing: what was read before. It is changed; without it each row
            begins a document.
        labels: `[batch, columns]`, usually `input_ids`: the loss is the mean of -log p of each one after the first,
            -100 and padding excepted. In training mode the compression loss is added.
        use_cache: whether the output has the cache; by default as the config says.
        logits_to_keep: only the logits of so many last columns; 0 for all. The others take no room.

        Raises CompressiveError for arguments of transformers that mean nothing here.
        """
        items, decode = kwargs.pop("num_items_in_batch", None), kwargs.pop("decode", False)
        _refuse(kwargs)
        cache = _one_cache(past_key_values, cache)
        mask = _own_columns(input_ids, attention_mask)
        if labels is not None and logits_to_keep:
            raise CompressiveError(f"logits_to_keep ({logits_to_keep}) must be 0 with labels, which need all logits")
        if cache.batch_size not in (None, len(input_ids)):
            raise CompressiveError(f"the cache has {cache.batch_size} lanes, input_ids {len(input_ids)} rows")
        logits, compression_loss = self._advance(input_ids, mask, cache, logits_to_keep, decode)
        loss = None
        if labels is not None:
            targets = _targets(labels, mask)
            # Half precision would lose the small differences between probable tokens.
            loss = next_token_loss(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
            loss = loss + compression_loss if self.training else loss
            # Trainer counts the targets of all batches that one update accumulates.
            loss = loss if items is None else loss * (targets != IGNORE_INDEX).sum() / items
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return CompressiveTransformerOutput(
            loss=loss,
            logits=logits,
            compression_loss=compression_loss,
            **({CACHE_NAME: cache} if use_cache else {}),
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: CompressiveTransformerCache | None = None,
        cache: CompressiveTransformerCache | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The ids that the cache has not read, and what else `forward` is given.

        With a cache `input_ids` are all ids from the beginning, or the new ones only where `attention_mask` has
        columns for all. A cache of fewer lanes is repeated for beams and samples. What follows the first iteration is
        read by a decoder with the weights as they are then.
        """
        cache = _one_cache(past_key_values, cache)
        if is_first_iteration:
            cache.memory = cache.memory  # an earlier decoder may have other weights than the model has now
        if cache.batch_size is not None and len(input_ids) != cache.batch_size:
            cache.batch_repeat_interleave(max(1, len(input_ids) // cache.batch_size))
        if cache.columns:
            given = input_ids.shape[1]
            new = given if next_sequence_length is None else next_sequence_length
            if attention_mask is not None:
                new = attention_mask.shape[1] - cache.columns
            if not 0 < new <= given:
                raise CompressiveError(
                    f"input_ids have {given} columns, but the cache has read {cache.columns} already: give all ids "
                    "from the beginning, or the new ones with an attention_mask over all columns"
                )
            input_ids = input_ids[:, given - new :]
        kept: dict[str, Any] = {name: kwargs[name] for name in ("use_cache", "logits_to_keep") if name in kwargs}
        kept["decode"] = bool(cache.columns) and not is_first_iteration
        return {"input_ids": input_ids, "attention_mask": attention_mask, CACHE_NAME: cache, **kept}

    def get_input_embeddings(self) -> Any:
        """The embedding, whose rows are the output's too."""
        return self.model.embedding

    def get_output_embeddings(self) -> None:
        """None: the rows of the input are the output's, there are no others."""

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """The embedding where nothing is asked for; else CompressiveError."""
        wanted = args[0] if args else kwargs.get("new_num_tokens")
        if wanted not in (None, self.config.vocab_size):
            raise CompressiveError(
                f"the vocabulary cannot be resized to {wanted} ids: the last of its {self.config.vocab_size} is the "
                "start of documents, and padding needs no id of its own; other ids need data of another tokenizer"
            )
        return self.get_input_embeddings()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: `forward` makes the cache itself, once it knows how many beams there are."""
        return False

    def _init_weights(self, module: Any) -> None:
        """Nothing: the package's model has initialised itself, and parameters that files lack are an error."""

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Compute what a block keeps for its backward pass again instead of keeping it, or stop doing so."""
        if getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise CompressiveError("use_reentrant must be False: the other form loses the gradient of compression")
        self.model.gradient_checkpointing = every_n_layers if enable else 0

    def _advance(
        self, tokens: Tensor, mask: Tensor | None, cache: CompressiveTransformerCache, keep: int, decode: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits of the last `keep` columns (0: of all) and the compression loss; the cache has read `tokens` then."""
        alone = tokens.shape[1] == 1 and (mask is None or bool(mask.all()))
        mixed = torch.is_autocast_enabled(tokens.device.type)
        if (
            decode
            and alone
            and not (mixed or self.training or torch.is_grad_enabled())
            and has_plain_layers(self.model)
        ):
            logits = cache.step(self.model, tokens[:, 0])[:, None]
            loss = logits.new_zeros(())
        else:
            logits, cache.memory, loss = self._read(tokens, mask, cache.memory, keep)
        cache.columns += tokens.shape[1]
        return logits, loss

    def _read(
        self, tokens: Tensor, mask: Tensor | None, memory: Memory | None, keep: int
    ) -> tuple[Tensor, Memory, Tensor]:
        """Logits of the last `keep` columns (0: of all), memory, and the compression loss, a mean over segments."""
        columns, segment = tokens.shape[1], self.model.config.segment_length
        # A segment at a time where logits are thrown away, so that a book needs no more room than a page.
        width, first_kept = (segment, columns - keep) if keep else (columns, 0)
        logits, losses = [], []
        for first in range(0, columns, width):
            part = slice(first, first + width)
            output = _read_real(self.model, tokens[:, part], None if mask is None else mask[:, part], memory)
            memory = output.memory
            losses.append(output.compression_loss)
            if first + width > first_kept:
                logits.append(output.logits[:, max(0, first_kept - first) :])
        assert memory is not None
        return torch.cat(logits, dim=1), memory, torch.stack(losses).sum() / -(-columns // segment)


def _read_real(model: CompressiveTransformer, tokens: Tensor, mask: Tensor | None, memory: Memory | None) -> Output:
    """The output for tokens that are real where `mask [batch, columns]` says so; each row's stand where they stood."""
    if mask is None or bool(mask.all()):
        output: Output = model(tokens, memory)
        return output
    # The model reads what stands at the left of a row, up to the row's own length.
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    output = model(tokens.gather(1, order), memory, mask.sum(1).cpu())
    lanes = torch.arange(len(tokens), device=tokens.device)[:, None]
    logits = output.logits[lanes, order.argsort(dim=1)]
    return replace(output, _logits=logits)


def _own_columns(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Which of `input_ids` are real (bool), or None where all are."""
    if attention_mask is None:
        return None
    batch_size, columns = input_ids.shape
    if attention_mask.ndim != 2 or len(attention_mask) != batch_size or attention_mask.shape[1] < columns:
        raise CompressiveError(
            f"attention_mask must be [batch = {batch_size}, columns >= {columns}], got {list(attention_mask.shape)}"
        )
    return attention_mask[:, -columns:].to(input_ids.device).bool()


def _targets(labels: Tensor, mask: Tensor | None) -> Tensor:
    """The next label of each column, -100 where there is none or where one of the two is padding."""
    labels = labels if mask is None else labels.masked_fill(~mask, IGNORE_INDEX)
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    return targets if mask is None else targets.masked_fill(~mask, IGNORE_INDEX)


def _one_cache(first: Any, second: Any) -> CompressiveTransformerCache:
    """The cache under one of its two names, or a new one."""
    if first is not None and second is not None:
        raise CompressiveError("past_key_values and cache are two names of one thing: give one of them")
    cache = first if second is None else second
    if cache is None:
        return CompressiveTransformerCache()
    if not isinstance(cache, CompressiveTransformerCache):
        raise CompressiveError(
            f"the cache must be a CompressiveTransformerCache, got {type(cache).__name__}: leave it out to begin one"
        )
    return cache


def _refuse(kwargs: dict[str, Any]) -> None:
    """Raise CompressiveError for arguments that ask for what there is not."""
    for name, value in kwargs.items():
        if value is not None and value is not False:
            raise CompressiveError(
                f"{name} is not for this model, which reads input_ids, finds places by itself and gives logits; "
                "docs/transformers.md lists what applies"
            )
