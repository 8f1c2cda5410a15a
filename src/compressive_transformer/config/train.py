"""Config of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import CompressiveError
from .checks import check_range, check_types
from .model import ModelConfig


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run; the schedule is the paper's (Sec. 4 and 5.5.1).

    The main fields are `steps`, `batch_size` (lanes, each of which reads one segment a step), `learning_rate` and
    `warmup_steps` of the network, `compression_learning_rate` of the compression functions, and `precision`. Fields
    that end in `_every` are intervals in steps.

    Raises CompressiveError, with the field, its value and the valid range, if a value is invalid.
    """

    steps: int = 10_000
    """Number of forward and backward passes over all lanes; each lane reads one segment in each, or `bptt_segments`."""
    batch_size: int = 16
    """Lanes over all processes; a multiple of the number of processes times `micro_batches`."""
    bptt_segments: int = 2
    """Segments per lane and step if the model's `compression_loss` is "bptt"; otherwise a step reads one."""
    micro_batches: int = 1
    """Number of groups of lanes that a step reads one after another, to save activation memory."""
    max_document_length: int = 0
    """Tokens, a multiple of `segment_length`: longer training documents are split into pieces of this length, each
    starting with empty memory. 0 for no limit."""
    learning_rate: float = 3e-4
    """Peak learning rate of the network, reached after warm-up."""
    min_learning_rate: float = 1e-6
    """Learning rate at the start of warm-up and at the end of cosine decay."""
    warmup_steps: int = 500
    """Steps of linear warm-up, followed by cosine decay to the last step."""
    max_grad_norm: float = 0.1
    """Gradient norm to which the network's gradient is clipped ("crucial", App. B)."""
    weight_decay: float = 0.01
    """Decoupled weight decay of the network's matrices."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the matrices of attention and feed-forward networks; all other parameters use AdamW."""
    compression_learning_rate: float = 3e-5
    """Peak learning rate of the compression functions f_c, under the same schedule."""
    compression_max_grad_norm: float = 1.0
    """Gradient norm to which the gradient of all compression functions together is clipped."""
    compression_weight_decay: float = 0.0
    """Decoupled weight decay of the compression functions."""
    steps_per_update: int = 1
    """Gradient accumulation: steps per update of the parameters, whose gradients are averaged."""
    late_steps_per_update: int = 1
    """Steps per update from step `late_update_step` on (in the paper 4, from step 60,000 on)."""
    late_update_step: int = 0
    """Step from which `late_steps_per_update` applies; 0 for never."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of forward and backward passes; bf16 is automatic mixed precision."""
    gradient_checkpointing: bool = False
    """Recompute the activations of blocks in the backward pass: less activation memory, more time."""
    compile: bool = False
    """Compile the tensor operations of blocks with torch.compile."""
    sharded: bool = False
    """Shard parameters, gradients and optimizer state over processes (FSDP2) instead of replicating them (DDP)."""
    max_skipped_updates: int = 10
    """Updates that may be skipped in a row because gradients are not finite; one more stops the run."""
    seed: int = 0
    """Seed of initial weights, order of documents, dropout and samples."""
    log_every: int = 10
    """Steps between lines of the log."""
    validate_every: int = 500
    """Steps between validations, after which the best model so far is saved; 0 for never."""
    validation_tokens: int = 200_000
    """Tokens of the validation split to score, from the starts of its documents; 0 for all."""
    sample_every: int = 0
    """Steps between samples of generated text; 0 for never."""
    sample_tokens: int = 200
    """Tokens per sample."""
    checkpoint_every: int = 500
    """Steps between checkpoints to resume from; one is always written at the end."""
    keep_checkpoints: int = 2
    """Number of latest checkpoints to keep; an earlier one helps if the last is damaged."""

    def __post_init__(self) -> None:
        check_types(self)
        counts = ("steps", "batch_size", "micro_batches", "steps_per_update", "late_steps_per_update")
        check_range(self, (*counts, "log_every", "sample_tokens", "checkpoint_every", "keep_checkpoints"), low=1)
        check_range(self, ("bptt_segments",), low=2)
        rates = ("min_learning_rate", "weight_decay", "compression_learning_rate")
        intervals = ("warmup_steps", "late_update_step", "validate_every", "sample_every")
        check_range(self, (*rates, *intervals, "compression_weight_decay"), low=0)
        check_range(self, ("max_document_length", "validation_tokens", "seed", "max_skipped_updates"), low=0)
        for name in ("learning_rate", "max_grad_norm", "compression_max_grad_norm"):
            if not getattr(self, name) > 0:
                raise CompressiveError(f"{name} ({getattr(self, name)}) must be more than 0")
        if self.sharded and self.optimizer == "muon":
            raise CompressiveError("sharded needs optimizer = 'adamw': Muon orthogonalizes full matrices")
        if self.warmup_steps > self.steps:
            raise CompressiveError(f"warmup_steps ({self.warmup_steps}) must be at most steps ({self.steps})")
        if self.seed >= 2**63:
            raise CompressiveError(f"seed ({self.seed}) must be less than 2**63")
        if self.batch_size % self.micro_batches:
            raise CompressiveError(f"micro_batches ({self.micro_batches}) must divide batch_size ({self.batch_size})")

    def segments_of(self, model: ModelConfig) -> int:
        """Return the number of segments per lane that a step of this model reads."""
        return self.bptt_segments if model.compression_loss == "bptt" else 1
