"""Rows of ids with padding on either side: masks, targets, and how the model reads them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, arange
from torch.nn import functional

from ..errors import CompressiveError
from ..memory import Memory
from ..model import CompressiveTransformer, Output
from ..model.embedding import IGNORE_INDEX


def mask_of(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Return the mask of `input_ids`, bool `[batch, columns]`, False for padding; None if there is no padding."""
    if attention_mask is None:
        return None
    batch_size, columns = input_ids.shape
    if attention_mask.ndim != 2 or len(attention_mask) != batch_size or attention_mask.shape[1] < columns:
        raise CompressiveError(
            f"attention_mask must be [batch = {batch_size}, columns >= {columns}], got {list(attention_mask.shape)}"
        )
    mask = attention_mask[:, -columns:].to(input_ids.device).bool()
    return None if bool(mask.all()) else mask


def targets_of(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Return the next label of each column `[batch, columns]`, -100 without one and next to padding."""
    labels = labels if mask is None else labels.masked_fill(~mask, IGNORE_INDEX)
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    return targets if mask is None else targets.masked_fill(~mask, IGNORE_INDEX)


def read(model: CompressiveTransformer, tokens: Tensor, mask: Tensor | None, memory: Memory | None) -> Output:
    """Return the output for rows with padding, which does not enter memory; logits are in the columns of `tokens`."""
    if mask is None or bool(mask.all()):
        output: Output = model(tokens, memory)
        return output
    # The model reads the first tokens of each row, as many as the row's length says.
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    output = model(tokens.gather(1, order), memory, mask.sum(1).cpu())
    lanes = arange(len(tokens), device=tokens.device)[:, None]
    return replace(output, _logits=output.logits[lanes, order.argsort(dim=1)])
