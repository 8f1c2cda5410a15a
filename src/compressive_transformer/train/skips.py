"""Updates that are skipped because gradients are not finite: which lanes are reset, and when the run stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..data import Split
from ..data.lanes import Segment
from ..errors import CompressiveError
from ..memory import Memory
from .distributed import Processes
from .log import describe_skip


def reset_lanes(
    memories: Sequence[Memory], segment: Segment, split: Split, processes: Processes
) -> tuple[list[Memory], dict[str, str]]:
    """Reset the lanes whose memory is not finite.

    Returns the memories, and by number, over all processes, the title of the document that each of these lanes reads.
    """
    masks = [~memory.finite() for memory in memories]
    lanes = torch.cat(masks).nonzero().flatten().tolist()
    first = processes.rank * len(segment.documents)
    titles = {str(first + lane): split.documents[int(segment.documents[lane])].title for lane in lanes}
    all_titles = {lane: title for local in processes.gather(titles) for lane, title in local.items()}
    return [memory.reset(mask) for memory, mask in zip(memories, masks, strict=True)], all_titles


def check_skips(run: Path, in_a_row: int, limit: int, skipped: Mapping[str, Any]) -> None:
    """Raise CompressiveError if more than `limit` updates were skipped in a row; `skipped` describes the last."""
    if in_a_row > limit:
        raise CompressiveError(
            f"{run}: {in_a_row} updates in a row were skipped, more than max_skipped_updates ({limit}); the last: "
            f"{describe_skip(skipped)}. The last checkpoint is intact: resume from it with --resume latest, or start a "
            "new run with a smaller learning_rate or more warmup_steps"
        )
