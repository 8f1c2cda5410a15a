"""The config of a model for transformers: the fields of `ModelConfig`, and the special ids of generation."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers import PretrainedConfig

from ..config import ModelConfig
from ..config.toml import upgrade

BYTES = 257
"""Token ids of text as bytes, the default of `vocab_size`."""


class CompressiveTransformerConfig(PretrainedConfig):  # type: ignore[misc]
    """Config with all fields of `ModelConfig`, of the same names and defaults.

    `bos_token_id` is the start id, the last one of the vocabulary, with which documents start. There is no
    end-of-document token: the model is never trained to predict one. `eos_token_id` and `pad_token_id` are the start
    id too: otherwise `generate` would treat the start of a prompt without an attention mask as padding.

    Args:
        fields: Fields of `ModelConfig`, also by their names in transformers (`hidden_size`, `num_hidden_layers`,
            `num_attention_heads`, `intermediate_size`), and those of `PretrainedConfig`.

    Raises:
        CompressiveError: A value is not allowed, as in `ModelConfig`.
    """

    model_type = "compressive_transformer"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "d_ff",
    }
    # Both names of the cache, see `compat`, which needs PyTorch; a config does not.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values", "compression_loss"]

    def __init__(self, **fields: Any) -> None:
        fields = upgrade({self.attribute_map.get(name, name): value for name, value in fields.items()})
        names = {field.name for field in dataclasses.fields(ModelConfig)}
        given = {name: fields.pop(name) for name in names & fields.keys()}
        core = dataclasses.asdict(ModelConfig(**{"vocab_size": BYTES, **given}))
        for name, value in core.items():
            setattr(self, name, list(value) if isinstance(value, tuple) else value)
        start = core["vocab_size"] - 1
        ids = {"bos_token_id": start, "eos_token_id": start, "pad_token_id": start}
        self.use_cache = fields.pop("use_cache", True)
        super().__init__(**{**ids, **fields})

    @classmethod
    def from_core(cls, config: ModelConfig) -> CompressiveTransformerConfig:
        """Return a config of the package in this form."""
        return cls(**dataclasses.asdict(config))

    def to_core(self) -> ModelConfig:
        """Return the config of the package's model."""
        return ModelConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)})
