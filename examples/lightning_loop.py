"""Training with Lightning: memory is carried from batch to batch and saved in the checkpoint, so runs resume exactly.

pip install lightning
python examples/lightning_loop.py runs/lightning
"""

import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import lightning
import torch

import compressive_transformer as ct

STEPS, BATCH, CLIP = 10, 4, 1.0
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}


class Training(lightning.LightningModule):
    """A model, its memory, and the lanes that it reads."""

    def __init__(self, corpus: ct.Corpus, config: ct.ModelConfig) -> None:
        super().__init__()
        self.model = ct.CompressiveTransformer(config)
        self.lanes = ct.lanes(corpus.train, batch_size=BATCH, length=config.segment_length, seed=0, endless=True)
        self.memory = self.model.empty_memory(BATCH)

    def train_dataloader(self) -> Any:
        """Return step numbers only: Lightning prefetches a batch, but lanes must stay in step with memory."""
        return range(STEPS)

    def training_step(self, number: int) -> torch.Tensor:
        """Return the loss of the next segment of each lane."""
        segment = next(self.lanes)
        memory = self.memory.to(self.device).reset(segment.starts)
        output = self.model(segment.tokens.to(self.device), memory, segment.lengths)
        self.memory = output.memory  # detached: backward never reaches the previous batch
        return ct.next_token_loss(output.logits, segment.targets.to(self.device)) + output.compression_loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW with a group for the network and one for the compression functions."""
        compression = [p for name, p in self.model.named_parameters() if ".compression." in name]
        network = [p for name, p in self.model.named_parameters() if ".compression." not in name]
        return torch.optim.AdamW([{"params": network, "lr": 3e-3}, {"params": compression, "lr": 3e-4}])

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip each group separately: with one norm for both, each loss would change the other's step."""
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], CLIP)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add memory and the position of the lanes."""
        checkpoint.update(memory=self.memory.state_dict(), lanes=self.lanes.state_dict())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore memory and the position of the lanes."""
        self.memory = ct.Memory.from_state_dict(checkpoint["memory"])
        self.lanes.load_state_dict(checkpoint["lanes"])


def main(out: Path) -> Training:
    """Prepare the corpus `out`/data, train for an epoch, stop, resume for another one and save the model."""
    with as_file(files("compressive_transformer.apps.demo") / "sample") as sample:
        corpus = ct.prepare(sample, out / "data")
    lengths = {"segment_length": 32, "memory_length": 32, "compressed_length": 32, "compression_rate": 4}
    config = ct.ModelConfig(vocab_size=corpus.vocab_size, d_model=32, n_layers=2, n_heads=2, **lengths)
    torch.manual_seed(0)
    first = lightning.Trainer(max_epochs=1, **QUIET)
    first.fit(Training(corpus, config))
    first.save_checkpoint(out / "epoch.ckpt")
    training = Training(corpus, config)  # as in a new process
    lightning.Trainer(max_epochs=2, **QUIET).fit(training, ckpt_path=out / "epoch.ckpt")
    ct.save(out / "run", training.model, corpus.tokenizer)
    return training


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"))
