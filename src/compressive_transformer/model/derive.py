"""A network with the compression functions of another: what f_c has learned, used where it was not trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..config import ModelConfig, PerLayer
from ..errors import CompressiveError
from .model import CompressiveTransformer

OF_COMPRESSION = ("compression", "compression_heads", "compression_loss", "compressed_scale")
"""The fields of the config that go with the functions."""


def with_lengths(model: CompressiveTransformer, **lengths: PerLayer) -> CompressiveTransformer:
    """The same network, parameters shared, with other `segment_length`, `memory_length`, `compressed_length`.

    Lengths of memory may be one for each layer, as in `ModelConfig`. The paper evaluates with longer memories
    than it trains with (Tables 8 and 9). Raises CompressiveError where parameters are missing: a layer trained
    without compressed memory has no compression function.
    """
    allowed = ("segment_length", "memory_length", "compressed_length")
    if wrong := sorted(set(lengths) - set(allowed)):
        raise CompressiveError(f"{wrong[0]!r} is not a length; with_lengths changes {', '.join(allowed)}")
    config = replace(model.config, **lengths)  # type: ignore[arg-type]
    with torch.device("meta"):
        changed = CompressiveTransformer(config)
    wanted = dict.fromkeys(changed.state_dict())
    parameters = {name: value for name, value in model.state_dict(keep_vars=True).items() if name in wanted}
    missing = sorted(set(wanted) - set(parameters))
    if missing:
        raise CompressiveError(
            f"compressed_length ({config.compressed_length}) needs parameters that this model was built "
            f"without: {missing[0]}; keep compressed_length 0 in that layer, or train with compressed memory"
        )
    changed.load_state_dict(parameters, assign=True)
    return changed.train(model.training)


def with_compression(model: CompressiveTransformer, donor: CompressiveTransformer) -> CompressiveTransformer:
    """The network `model` with the compression functions of `donor`, layer by layer; parameters are shared with both.

    What belongs to the functions comes with them: their kind, the scale of what they give, and their loss. Those of
    the donor are taken to the device and the precision of the network. A new `CompressiveTransformer` as donor
    gives functions as they are before training.

    Raises CompressiveError where d_model, n_layers, rates or the layers with compressed memory differ.
    """
    for (what, ours), (_, theirs) in zip(_sizes(model.config), _sizes(donor.config), strict=True):
        if ours != theirs:
            raise CompressiveError(
                f"the donor's compression functions do not fit: {what} is {theirs} there and {ours} here; "
                "both must be the same"
            )
    config = replace(model.config, **{field: getattr(donor.config, field) for field in OF_COMPRESSION})
    with torch.device("meta"):
        changed = CompressiveTransformer(config)
    ours, theirs = model.state_dict(keep_vars=True), donor.state_dict(keep_vars=True)
    like = model.embedding.weight
    changed.load_state_dict(
        {
            name: theirs[name].to(like.device, like.dtype) if ".compression" in name else ours[name]
            for name in changed.state_dict()
        },
        assign=True,
    )
    return changed.train(model.training)


def _sizes(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """What must agree for a function of one network to work in another."""
    layers = [config.of_layer(layer) for layer in range(config.n_layers)]
    yield "d_model", config.d_model
    yield "n_layers", config.n_layers
    yield "compression_rate by layer", [own.compression_rate for own in layers]
    yield "compressed memory by layer", [own.compressed_length > 0 for own in layers]
