"""Cost and gain of gradient checkpointing, torch.compile and cached distances.

    python benchmarks/options.py

Memory is what a fresh process gains at its peak over what it held before the first step. Times are CPU times in one
process, of both ways in turn; their ratio is the median, the first two left out.
"""

import resource
import subprocess
import sys
import time
from statistics import median

import torch

import compressive_transformer as ct
from compressive_transformer.attention.positions import PositionCache
from compressive_transformer.model.block import Block
from works import WORKS, full_memory, segments

STEPS = 10


def build(position: str, *, layers: int) -> ct.CompressiveTransformer:
    """Return a model whose activations are larger than its parameters."""
    torch.manual_seed(0)
    config = ct.ModelConfig(
        vocab_size=257,
        d_model=256,
        n_layers=layers,
        n_heads=4,
        segment_length=128,
        memory_length=128,
        compressed_length=128,
        compression_rate=4,
        position="rotary" if position == "rotary" else "relative",
    )
    return ct.CompressiveTransformer(config)


def step(model: ct.CompressiveTransformer, memory: ct.Memory, seed: int) -> ct.Memory:
    """Run forward and backward passes on a segment of random bytes."""
    tokens = torch.randint(0, 256, (memory.batch_size, 129), generator=torch.Generator().manual_seed(seed))
    output = model(tokens[:, :-1], memory)
    (ct.next_token_loss(output.logits, tokens[:, 1:]) + output.compression_loss).backward()
    model.zero_grad()
    return output.memory


def peak(checkpointing: bool) -> float:
    """Return the MiB that this process gains in two steps."""
    model = build("relative", layers=8)
    model.gradient_checkpointing = int(checkpointing)
    memory, before = model.empty_memory(16), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(2):
        memory = step(model, memory, seed)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def ratio(position: str) -> float:
    """Return the CPU time of a compiled step over that of an eager one."""
    models = [build(position, layers=4), build(position, layers=4)]
    memories = [model.empty_memory(4) for model in models]
    for block in models[1].blocks:
        assert isinstance(block, Block)
        block.compiled = True
    ratios = []
    for seed in range(STEPS + 2):
        times = []
        for at, model in enumerate(models):
            begin = time.process_time()
            memories[at] = step(model, memories[at], seed)
            times.append(time.process_time() - begin)
        ratios.append(times[1] / times[0])
    return median(ratios[2:])


@torch.no_grad()
def kept(work: str, batch: int, tokens: int) -> float:
    """Return the CPU time of reading with cached distances over that of projecting them each time."""
    model, cache = ct.CompressiveTransformer(WORKS[work].config).eval(), PositionCache()
    memory, text = full_memory(model, batch), next(segments(batch, WORKS[work].segment_length))[0][:, :tokens]
    ratios = []
    for _ in range(STEPS + 2):
        times = []
        for way in (None, cache):
            begin = time.process_time()
            model(text, memory, position_cache=way)
            times.append(time.process_time() - begin)
        ratios.append(times[1] / times[0])
    return median(ratios[2:])


def main() -> None:
    """Print all results."""
    for checkpointing in ("no", "yes"):
        command = [sys.executable, __file__, "peak", checkpointing]
        gained = subprocess.check_output(command, text=True).strip()
        print(f"gradient checkpointing {checkpointing}: {gained} MiB more at the peak", flush=True)
    for position in ("rotary", "relative"):
        print(f"compiled over eager, {position}: {ratio(position):.2f}", flush=True)
    for work, sizes in WORKS.items():
        for batch, tokens in ((sizes.batch, sizes.segment_length), (1, 64)):
            share = kept(work, batch, tokens)
            print(f"distances kept over projected, work {work}, {batch} × {tokens} tokens: {share:.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        print(round(peak(sys.argv[2] == "yes")))
    else:
        torch.set_num_threads(1)
        main()
