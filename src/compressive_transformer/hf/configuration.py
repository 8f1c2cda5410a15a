"""The config of a model as transformers keeps it: the fields of `ModelConfig`, and the ids that generation knows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers import PretrainedConfig

from ..config import ModelConfig
from ..config.toml import upgrade

BYTES = 257
"""Token ids of text as bytes, which a config without a `vocab_size` has."""


class CompressiveTransformerConfig(PretrainedConfig):  # type: ignore[misc]
    """All fields of `ModelConfig`, by the same names and with the same defaults.

    `bos_token_id` is the start id, the last one of the vocabulary, with which documents begin. There is no token
    that ends a document, since the model is never trained to say one. `eos_token_id` and `pad_token_id` are the start
    id too: else `generate` would guess, where no attention mask is given, that the start of a prompt is padding.

    Raises CompressiveError as `ModelConfig` does.
    """

    model_type = "compressive_transformer"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "d_ff",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values", "compression_loss"]

    def __init__(self, **fields: Any) -> None:
        fields = upgrade({self.attribute_map.get(name, name): value for name, value in fields.items()})
        names = {field.name for field in dataclasses.fields(ModelConfig)}
        own = {name: fields.pop(name) for name in names & fields.keys()}
        core = dataclasses.asdict(ModelConfig(**{"vocab_size": BYTES, **own}))
        for name, value in core.items():
            setattr(self, name, list(value) if isinstance(value, tuple) else value)
        start = core["vocab_size"] - 1
        ids = {"bos_token_id": start, "eos_token_id": start, "pad_token_id": start}
        self.use_cache = fields.pop("use_cache", True)
        super().__init__(**{**ids, **fields})

    @classmethod
    def of(cls, config: ModelConfig) -> CompressiveTransformerConfig:
        """The same model's config in this form."""
        return cls(**dataclasses.asdict(config))

    def to_core(self) -> ModelConfig:
        """The config that the package's own model is built from."""
        return ModelConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)})
