"""Parameters in shards: each process holds its share, and all of them make the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compressive_transformer.config import TrainConfig
from compressive_transformer.errors import CompressiveError
from compressive_transformer.train.distributed import distribute_like, full_tensor, unshard
from runs import tiny_model

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SCRIPT = """
import torch
from compressive_transformer.train.distributed import distribute_like, full_tensor, init_distributed, shard, unshard
from runs import tiny_model

with init_distributed() as processes:
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shard(model, processes)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    total = sum(value.numel() for value in before.values())
    assert total / 2 <= processes.all_reduce(torch.tensor(float(held))) / 2 <= 1.01 * total / 2, (held, total)
    assert held < 0.55 * total
    after = unshard(model).state_dict()
    assert after.keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(after[name], before[name]), name
        assert torch.equal(distribute_like(before[name], parameter).to_local(), parameter.to_local()), name
    print("shares agree")

    def losses(model, lane):
        # The first lane has a full memory and evicts; the other reads the end of a short document and commits nothing.
        tokens = torch.arange(48)[None] * (lane + 3) % 256
        with torch.no_grad():
            memory = alone.empty_memory(1) if lane else alone(tokens[:, :40]).memory
        output = model(tokens[:, 40 : 45 if lane else 48], memory)
        return output.logits.square().mean() + output.compression_loss

    alone = tiny_model()
    losses(model, processes.rank).backward()
    found = {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}
    (sum(losses(alone, lane) for lane in range(2)) / 2).backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=lambda text: f"{name}: {text}")
        assert ".compression" not in name or parameter.grad.any(), name
    print("gradients agree")
"""


def test_each_process_holds_its_share_and_all_make_the_model_and_its_gradient() -> None:
    done = subprocess.run(
        [*LAUNCH, "--no-python", sys.executable, "-c", SCRIPT],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shares agree") == 2
    assert done.stdout.count("gradients agree") == 2


def paths() -> str:
    return os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def test_what_is_whole_stays_as_it_is() -> None:
    model = tiny_model()
    assert unshard(model) is model
    tensor = torch.ones(3)
    assert full_tensor(tensor) is tensor
    assert distribute_like(tensor, like=torch.zeros(3)) is tensor


def test_muon_is_refused_where_matrices_are_in_shards() -> None:
    with pytest.raises(CompressiveError, match="sharded needs optimizer = 'adamw'"):
        TrainConfig(sharded=True, optimizer="muon")
