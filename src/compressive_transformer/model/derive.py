"""Models made from the parameters of others: with other lengths of memory, with other compression functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, PerLayer
from ..errors import CompressiveError
from .model import CompressiveTransformer

OF_COMPRESSION = ("compression", "compression_heads", "compression_loss", "compressed_scale")
"""Fields of the config that belong to the compression functions."""


def from_parameters(
    config: ModelConfig, parameters: Mapping[str, Tensor], like: CompressiveTransformer | None = None
) -> CompressiveTransformer:
    """Return a model that holds these tensors without a copy; its mode and kernel of attention are those of `like`."""
    with torch.device("meta"):
        model = CompressiveTransformer(config, "auto" if like is None else like.attention)
    model.load_state_dict(dict(parameters), assign=True)
    return model if like is None else model.train(like.training)


def with_lengths(model: CompressiveTransformer, **lengths: PerLayer) -> CompressiveTransformer:
    """Return the same network with other lengths of memory, as in Tables 8 and 9 of the paper; parameters are shared.

    Args:
        model: A network, which stays as it is.
        lengths: `segment_length`, `memory_length` or `compressed_length`, in slots: one number, or a list with one for
            each layer.

    Raises:
        CompressiveError: Another field is named, or parameters are missing: a layer trained without compressed memory
            has no compression function.

    Example:
        >>> longer = ct.with_lengths(model, compressed_length=1024)
    """
    allowed = ("segment_length", "memory_length", "compressed_length")
    if wrong := sorted(set(lengths) - set(allowed)):
        raise CompressiveError(f"{wrong[0]!r} is not a length; with_lengths changes {', '.join(allowed)}")
    config = replace(model.config, **lengths)  # type: ignore[arg-type]
    with torch.device("meta"):
        wanted = dict.fromkeys(CompressiveTransformer(config).state_dict())
    parameters = {name: value for name, value in model.state_dict(keep_vars=True).items() if name in wanted}
    if missing := sorted(set(wanted) - set(parameters)):
        raise CompressiveError(
            f"compressed_length ({config.compressed_length}) needs parameters that this model was built "
            f"without: {missing[0]}; keep compressed_length 0 in that layer, or train with compressed memory"
        )
    return from_parameters(config, parameters, model)


def with_compression(model: CompressiveTransformer, donor: CompressiveTransformer) -> CompressiveTransformer:
    """Return the network `model` with the compression functions of `donor`; parameters are shared with both.

    The kind of function, the scale of compressed states and the loss come with the functions.

    Args:
        model: A network, which stays as it is.
        donor: A model whose functions are taken, layer by layer, to the device and precision of the network. A new
            `CompressiveTransformer` gives functions as they are before training.

    Raises:
        CompressiveError: d_model, n_layers, rates or the layers with compressed memory differ.
    """
    for (name, ours), (_, theirs) in zip(_sizes(model.config), _sizes(donor.config), strict=True):
        if ours != theirs:
            raise CompressiveError(
                f"the donor's compression functions do not fit: {name} is {theirs} there and {ours} here; "
                "both must be the same"
            )
    config = replace(model.config, **{field: getattr(donor.config, field) for field in OF_COMPRESSION})
    like = model.embedding.weight
    network = {name: p for name, p in model.state_dict(keep_vars=True).items() if ".compression" not in name}
    functions = {
        name: p.to(like.device, like.dtype)
        for name, p in donor.state_dict(keep_vars=True).items()
        if ".compression" in name
    }
    return from_parameters(config, {**network, **functions}, model)


def _sizes(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield what must agree for a compression function of one network to work in another."""
    layers = [config.of_layer(layer) for layer in range(config.n_layers)]
    yield "d_model", config.d_model
    yield "n_layers", config.n_layers
    yield "compression_rate by layer", [sizes.compression_rate for sizes in layers]
    yield "compressed memory by layer", [sizes.compressed_length > 0 for sizes in layers]
