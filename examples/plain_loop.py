"""A training loop in plain PyTorch: memory is carried from batch to batch and reset at the start of a document.

python examples/plain_loop.py runs/plain
"""

import sys
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path

import torch

import compressive_transformer as ct
from compressive_transformer.evaluate import truncate_split

STEPS, BATCH, CLIP = 30, 4, 1.0


def main(out: Path) -> None:
    """Prepare the corpus `out`/data, train a small model on it and save it as `out`/run."""
    with as_file(files("compressive_transformer.apps.demo") / "sample") as sample:
        corpus = ct.prepare(sample, out / "data")
    torch.manual_seed(0)
    config = ct.ModelConfig(
        vocab_size=corpus.vocab_size,
        d_model=32,
        n_layers=2,
        n_heads=2,
        segment_length=32,
        memory_length=32,
        compressed_length=32,
        compression_rate=4,
    )
    model = ct.CompressiveTransformer(config)
    # The task loss trains the network only and the compression loss the compression functions only. Separate optimizer
    # groups and gradient norms keep it so: with one norm over all, a large loss of one would shrink the other's step.
    compression = [p for name, p in model.named_parameters() if ".compression." in name]
    network = [p for name, p in model.named_parameters() if ".compression." not in name]
    optimizer = torch.optim.AdamW([{"params": network, "lr": 3e-3}, {"params": compression, "lr": 3e-4}])

    memory = model.empty_memory(BATCH)
    segments = ct.lanes(corpus.train, batch_size=BATCH, length=config.segment_length)
    for step, segment in enumerate(islice(segments, STEPS), start=1):
        memory = memory.reset(segment.starts)  # lanes that start a document
        output = model(segment.tokens, memory, segment.lengths)
        loss = ct.next_token_loss(output.logits, segment.targets)
        (loss + output.compression_loss).backward()
        for parameters in (network, compression):
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        memory = output.memory  # detached: backward never reaches the previous segment
        if step % 10 == 0:
            print(f"step {step}  loss {loss.item():.3f} nats")

    ct.save(out / "run", model.eval(), corpus.tokenizer)
    print(ct.evaluate(model, truncate_split(corpus.test, corpus.tokenizer, 1_000)))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/plain"))
