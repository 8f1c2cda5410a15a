"""How a block's work is done, all kept, computed again or compiled, changes nothing of what it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from compressive_transformer.attention import KERNELS, masked_attention
from compressive_transformer.data import Corpus
from compressive_transformer.data.lanes import Segment
from compressive_transformer.model import block as block_module
from compressive_transformer.model.block import Block
from compressive_transformer.train.step import SegmentWindow
from runs import log_of, tiny_run
from small import random_tokens, small_model

pytestmark = [
    pytest.mark.usefixtures("cpu"),
    # What PyTorch's compiler says of itself.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def gradients_of(fields: dict[str, Any], *, checkpointing: bool) -> tuple[dict[str, torch.Tensor | None], list[int]]:
    """Gradients of two windows of two segments, and how often each block's feed-forward network ran."""
    model, ran = small_model(dropout=0.2, n_layers=2, **fields).train(), [0, 0]
    model.gradient_checkpointing = int(checkpointing)
    for layer, network in enumerate(block.feed_forward for block in model.blocks):
        network.register_forward_hook(lambda *_, layer=layer: ran.__setitem__(layer, ran[layer] + 1))
    window, memory, tokens = SegmentWindow(model, "fp32"), model.empty_memory(2), random_tokens(2, 17)
    starts, lengths = torch.zeros(2, dtype=torch.bool), torch.full((2,), 4)
    torch.manual_seed(1)
    for first in (0, 8):
        parts = [tokens[:, at : at + 5] for at in (first, first + 4)]
        read = window([Segment(part[:, :4], part[:, 1:], starts, lengths, starts.long(), 8) for part in parts], memory)
        (read.nats + read.compression_loss).backward()
        memory = read.memory
    return {name: parameter.grad for name, parameter in model.named_parameters()}, ran


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"compression_loss": "bptt"},
        {"compression_loss": "auto-encoding", "position": "rotary"},
        {"compression": "most-used", "norm": "post"},
    ],
    ids=str,
)
def test_gradients_of_what_is_computed_again_are_the_same_to_the_bit(fields: dict[str, Any]) -> None:
    kept, once = gradients_of(fields, checkpointing=False)
    again, twice = gradients_of(fields, checkpointing=True)
    assert (once, twice) == ([4, 4], [8, 8])
    for name, gradient in kept.items():
        if gradient is None:
            assert again[name] is None, name
        else:
            assert torch.equal(again[name], gradient), name
    assert sum(gradient is not None and bool(gradient.any()) for gradient in kept.values()) > len(kept) / 2


def test_nothing_is_computed_again_without_gradient() -> None:
    model = small_model()
    expected = model(random_tokens(2, 4)).logits
    model.gradient_checkpointing = 1
    with torch.no_grad():
        assert torch.equal(model(random_tokens(2, 4)).logits, expected)


def test_a_run_with_gradient_checkpointing_is_the_run_without(corpus: Corpus, finished: Path, tmp_path: Path) -> None:
    tiny_run(corpus, tmp_path / "run", model={"dropout": 0.1}, gradient_checkpointing=True)
    assert log_of(tmp_path / "run") == log_of(finished)


PLAIN = {"validate_every": 0, "sample_every": 0, "late_update_step": 0, "learning_rate": 1e-3}


@pytest.mark.slow  # two runs of the compiler
@pytest.mark.parametrize("ages", ["equal", "different"])
@pytest.mark.parametrize("position", ["relative", "rotary"])
def test_a_run_of_whole_segments_compiles_blocks_at_most_twice(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: str, ages: str
) -> None:
    # Relative attention as on a GPU: what CPUs have for it is no graph.
    monkeypatch.setitem(KERNELS, "auto", masked_attention)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Block.transform, backend=counter)
    monkeypatch.setattr(block_module, "_compiled_transform", lambda: compiled)
    torch._dynamo.reset()
    fields = {"position": position, "compression_rate": 4, "memory_length": 8}
    settings = {**PLAIN, "max_document_length": 24 if ages == "equal" else 0}
    tiny_run(corpus, tmp_path / "compiled", model=fields, compile=True, **settings)
    assert 1 <= counter.frame_count <= 2
    tiny_run(corpus, tmp_path / "eager", model=fields, **settings)
    assert counter.frame_count <= 2
    for line, expected in zip(log_of(tmp_path / "compiled"), log_of(tmp_path / "eager"), strict=True):
        for name in ("loss", "compression_loss", "gradient_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.slow  # the compiler takes half a minute
def test_the_default_compiler_trains_as_eager_code(corpus: Corpus, tmp_path: Path) -> None:
    torch._dynamo.reset()
    fields = {"position": "rotary", "n_layers": 1}
    tiny_run(corpus, tmp_path / "compiled", model=fields, compile=True, stop_at=4, **PLAIN)
    tiny_run(corpus, tmp_path / "eager", model=fields, stop_at=4, **PLAIN)
    for line, expected in zip(log_of(tmp_path / "compiled"), log_of(tmp_path / "eager"), strict=True):
        for name in ("loss", "compression_loss", "gradient_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4), name
