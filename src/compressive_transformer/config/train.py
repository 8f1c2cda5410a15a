"""How a model is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import CompressiveError
from .checks import check_range, check_types
from .model import ModelConfig


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained; the schedule is the paper's (Sec. 4 and 5.5.1).

    Raises CompressiveError that names the field, its value and the valid range.
    """

    steps: int = 10_000
    """Forward and backward passes over all lanes; in each, every lane reads one segment (or `bptt_segments`)."""
    batch_size: int = 16
    """Lanes over all processes; a multiple of the number of processes times `micro_batches`."""
    bptt_segments: int = 2
    """Segments of each lane that one step reads where the model's compression_loss is "bptt"; 1 with any other."""
    micro_batches: int = 1
    """Parts in which the lanes of one step go through the model, to save activation memory."""
    max_document_length: int = 0
    """Tokens, a multiple of `segment_length`: a longer training document is read in pieces of that length, each
    like a document of its own that begins with empty memory. 0 reads documents whole."""
    learning_rate: float = 3e-4
    """Highest learning rate of the network, reached after warm-up."""
    min_learning_rate: float = 1e-6
    """Learning rate from which warm-up begins, and to which the cosine leads back at the last step."""
    warmup_steps: int = 500
    """Steps over which the learning rate rises linearly; a cosine leads it back down afterwards."""
    max_grad_norm: float = 0.1
    """Largest norm of the network's gradient ("crucial", App. B)."""
    weight_decay: float = 0.01
    """Decoupled weight decay of the network's matrices."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the matrices of attention and feed-forward networks; all else, f_c too, is always AdamW's."""
    compression_learning_rate: float = 3e-5
    """Highest learning rate of f_c, under the same schedule."""
    compression_max_grad_norm: float = 1.0
    """Largest norm of the gradient of all compression functions together."""
    compression_weight_decay: float = 0.0
    """Decoupled weight decay of the compression functions."""
    steps_per_update: int = 1
    """Steps between two updates of the parameters; gradients are averaged over them."""
    late_steps_per_update: int = 1
    """Update period from `late_update_step` on (the paper: 4 from step 60,000 on)."""
    late_update_step: int = 0
    """Step from which `late_steps_per_update` holds; 0 for never."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of forward and backward passes; bf16 is automatic mixed precision."""
    gradient_checkpointing: bool = False
    """Whether backward computes again what a block would keep for it: less activation memory, more time."""
    compile: bool = False
    """Whether the tensor work of blocks goes through torch.compile in training; of one shape, it is compiled once."""
    sharded: bool = False
    """Whether several processes share parameters, gradients and moments (FSDP2) instead of holding all of them each."""
    max_skipped_updates: int = 10
    """Updates in a row that may be left out because their gradients are not finite; one more ends the run."""
    seed: int = 0
    """Decides initial weights, order of documents, dropout and samples."""
    log_every: int = 10
    """Steps between two lines of the log."""
    validate_every: int = 500
    """Steps between two validations; the best checkpoint is kept. 0 for never."""
    validation_tokens: int = 200_000
    """Tokens of the validation split that are scored, in beginnings of documents; 0 for all."""
    sample_every: int = 0
    """Steps between two samples of generated text; 0 for never."""
    sample_tokens: int = 200
    """Tokens of a sample."""
    checkpoint_every: int = 500
    """Steps between two checkpoints to resume from; one is always written at the end."""
    keep_checkpoints: int = 2
    """Checkpoints that stay, the newest ones; an earlier one is of use where the last is damaged."""

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
            raise CompressiveError("sharded needs optimizer = 'adamw': Muon orthogonalises whole matrices")
        if self.warmup_steps > self.steps:
            raise CompressiveError(f"warmup_steps ({self.warmup_steps}) must be at most steps ({self.steps})")
        if self.seed >= 2**63:
            raise CompressiveError(f"seed ({self.seed}) must be less than 2**63")
        if self.batch_size % self.micro_batches:
            raise CompressiveError(f"micro_batches ({self.micro_batches}) must divide batch_size ({self.batch_size})")

    def segments_of(self, model: ModelConfig) -> int:
        """Segments of each lane that one step of this model reads."""
        return self.bptt_segments if model.compression_loss == "bptt" else 1
