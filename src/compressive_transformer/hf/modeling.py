"""The model for transformers: the package's model with `generate`, `labels`, and memory as the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ..errors import CompressiveError
from ..generate.layers import has_plain_layers
from ..memory import Memory
from ..model import CompressiveTransformer, next_token_loss
from ..model.embedding import IGNORE_INDEX
from .cache import CompressiveTransformerCache
from .compat import CACHE_NAME, one_cache, refuse
from .configuration import CompressiveTransformerConfig
from .padding import mask_of, read, targets_of


@dataclass
class CompressiveTransformerOutput(CausalLMOutputWithPast):  # type: ignore[misc]
    """Output of a causal language model in transformers, with the compression loss."""

    compression_loss: Tensor | None = None
    """Scalar, summed over layers, mean over the segments that were read; trains the compression functions only."""


class CompressiveTransformerForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A Compressive Transformer that transformers can load, save, train and generate with.

    `model` is the package's model. A text gives the same logits in whatever chunks it is read, and padding marked by
    `attention_mask` never enters memory: each row is read as if it were alone.

    Args:
        config: Sizes of the network and of its memory. Weights are initialized as by `ct.CompressiveTransformer`.
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
    def from_core(cls, model: CompressiveTransformer) -> Self:
        """Return a model of the package in this form, in the same mode.

        Args:
            model: The model, whose parameters are shared, not copied.
        """
        with torch.device("meta"):
            wrapped = cls(CompressiveTransformerConfig.from_core(model.config))
        wrapped.model = model
        wrapped.config.dtype = model.embedding.weight.dtype
        wrapped.train(model.training)
        return wrapped

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as `PreTrainedModel.from_pretrained` does, from safetensors only.

        Raises:
            CompressiveError: Parameters are missing (transformers would initialize them), or `use_safetensors=False`.
        """
        if kwargs.get("use_safetensors") is False:
            raise CompressiveError("pickled weights are never loaded, since they can run code; expected safetensors")
        with_information = kwargs.pop("output_loading_info", False)
        kwargs.update(use_safetensors=True, output_loading_info=True)
        model, information = super().from_pretrained(*args, **kwargs)
        if missing := sorted(information["missing_keys"]):
            raise CompressiveError(f"parameter {missing[0]!r} is missing; the weights belong to another model")
        return (model, information) if with_information else model

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: CompressiveTransformerCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        decode: bool = False,
        **kwargs: Any,
    ) -> CompressiveTransformerOutput:
        """Return the logits of `input_ids`, the loss of `labels`, and the cache after them.

        Args:
            input_ids: Token ids `[batch, columns]`.
            attention_mask: `[batch, columns or more]`, 0 for padding, on either side; of more columns the last ones
                count. Logits of padding are undefined.
            cache: State after the ids that were read before, which is changed; without it each row starts a document.
                Its name before transformers 5.24, `past_key_values`, works too.
            labels: `[batch, columns]`, usually `input_ids`: the loss is the mean of -log p of each label after the
                first, without -100 and padding. In training mode the compression loss is added.
            use_cache: True to return the cache; by default as the config says.
            logits_to_keep: Number of last columns whose logits are returned; 0 for all. The others take no memory.
            decode: True to read one more token with the cached decoder of the cache, as `generate` does. The decoder
                keeps the weights that the model had at its first step.

        Returns:
            `loss`, `logits` `[batch, columns, vocab_size]`, the cache and `compression_loss`.

        Raises:
            CompressiveError: The arguments do not fit each other, or ask for something the model does not have.
        """
        items, former_name = kwargs.pop("num_items_in_batch", None), kwargs.pop("past_key_values", None)
        refuse(kwargs)
        cache, mask = one_cache(cache, former_name), mask_of(input_ids, attention_mask)
        if labels is not None and logits_to_keep:
            raise CompressiveError(f"logits_to_keep ({logits_to_keep}) must be 0 with labels, which need all logits")
        logits, compression_loss = self._advance(input_ids, mask, cache, logits_to_keep, decode)
        loss = None
        if labels is not None:
            loss = self._loss(logits, targets_of(labels, mask), compression_loss, items)
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
        """Return the arguments of `forward` for the ids that the cache has not read.

        With a cache `input_ids` are all ids from the start, or only the new ones if `attention_mask` has a column for
        every id. A cache of fewer lanes is repeated for beams and samples. Ids after the first iteration are read by a
        decoder, with the weights of that moment.
        """
        cache = one_cache(cache, past_key_values)
        if is_first_iteration:
            cache.end_decoding()  # an earlier decoder may have other weights than the model has now
        if cache.batch_size is not None and len(input_ids) != cache.batch_size:
            cache.batch_repeat_interleave(max(1, len(input_ids) // cache.batch_size))
        if cache.columns:
            given = input_ids.shape[1]
            new = given if next_sequence_length is None else next_sequence_length
            if attention_mask is not None:
                new = attention_mask.shape[1] - cache.columns
            if not 0 < new <= given:
                raise CompressiveError(
                    f"input_ids have {given} columns, but the cache has already read {cache.columns}: pass all ids "
                    "from the start, or the new ones with an attention_mask that has a column for every id"
                )
            input_ids = input_ids[:, given - new :]
        options: dict[str, Any] = {name: kwargs[name] for name in ("use_cache", "logits_to_keep") if name in kwargs}
        options["decode"] = bool(cache.columns) and not is_first_iteration
        return {"input_ids": input_ids, "attention_mask": attention_mask, CACHE_NAME: cache, **options}

    def get_input_embeddings(self) -> Any:
        """Return the embedding, whose rows are those of the output too."""
        return self.model.embedding

    def get_output_embeddings(self) -> None:
        """Return None: the output has no rows besides those of the input."""

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Return the embedding if the size stays the same.

        Raises:
            CompressiveError: Another size is asked for.
        """
        size = args[0] if args else kwargs.get("new_num_tokens")
        if size not in (None, self.config.vocab_size):
            raise CompressiveError(
                f"the vocabulary cannot be resized to {size} ids: the last of its {self.config.vocab_size} is the "
                "start of documents, and padding needs no id; other ids need data of another tokenizer"
            )
        return self.get_input_embeddings()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: `forward` makes the cache itself, when it knows the number of beams."""
        return False

    def _init_weights(self, module: Any) -> None:
        """Do nothing: the package's model initializes itself, and parameters that files lack are an error."""

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Recompute activations of blocks in the backward pass instead of keeping them, or keep them again."""
        if getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise CompressiveError("use_reentrant must be False: the other form loses the gradient of compression")
        self.model.gradient_checkpointing = every_n_layers if enable else 0

    def _advance(
        self, tokens: Tensor, mask: Tensor | None, cache: CompressiveTransformerCache, keep: int, decode: bool
    ) -> tuple[Tensor, Tensor]:
        """Read tokens into the cache; return logits of the last `keep` columns (0: all) and the compression loss."""
        if cache.batch_size not in (None, len(tokens)):
            raise CompressiveError(f"the cache has {cache.batch_size} lanes, input_ids {len(tokens)} rows")
        if decode and self._can_decode(tokens, mask):
            logits = cache.step(self.model, tokens[:, 0])[:, None]
            loss = logits.new_zeros(())
        else:
            logits, cache.memory, loss = self._read(tokens, mask, cache.memory, keep)
        cache.columns += tokens.shape[1]
        return logits, loss

    def _loss(self, logits: Tensor, targets: Tensor, compression_loss: Tensor, items: Any) -> Tensor:
        """Return the mean of -log p of the targets, in training mode with the compression loss."""
        # Half precision would lose the small differences between probable tokens.
        loss = next_token_loss(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
        loss = loss + compression_loss if self.training else loss
        # `items` is the number of targets in all micro-batches of an update, which Trainer counts.
        return loss if items is None else loss * (targets != IGNORE_INDEX).sum() / items

    def _can_decode(self, tokens: Tensor, mask: Tensor | None) -> bool:
        """Return True if the cached decoder reads these tokens as the model would."""
        autocast = torch.is_autocast_enabled(tokens.device.type)
        plain = not (autocast or self.training or torch.is_grad_enabled()) and has_plain_layers(self.model)
        return plain and tokens.shape[1] == 1 and mask is None

    def _read(
        self, tokens: Tensor, mask: Tensor | None, memory: Memory | None, keep: int
    ) -> tuple[Tensor, Memory, Tensor]:
        """Return logits of the last `keep` columns (0: all), memory, and the compression loss, mean over segments."""
        columns, segment = tokens.shape[1], self.model.config.segment_length
        # One segment at a time if logits are thrown away, so that a book needs no more room than a page.
        width, first_kept = (segment, columns - keep) if keep else (columns, 0)
        logits, losses = [], []
        for first in range(0, columns, width):
            chunk = slice(first, first + width)
            output = read(self.model, tokens[:, chunk], None if mask is None else mask[:, chunk], memory)
            memory = output.memory
            losses.append(output.compression_loss)
            if first + width > first_kept:
                logits.append(output.logits[:, max(0, first_kept - first) :])
        assert memory is not None
        return torch.cat(logits, dim=1), memory, torch.stack(losses).sum() / -(-columns // segment)
