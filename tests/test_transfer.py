"""Compression functions of one network in another: only they change, and what the script prints is what was scored."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from compressive_transformer.apps.experiment.plan import read_plan
from compressive_transformer.apps.experiment.running import RESULT, finish
from compressive_transformer.data import Corpus, open_corpus
from compressive_transformer.errors import CompressiveError
from compressive_transformer.model.derive import with_compression
from runs import MODEL, TRAINING, tiny_model

EXAMPLE = Path(__file__).parents[1] / "examples" / "transfer.py"
TOKENS = torch.arange(80).view(2, 40)  # five segments, so that compressed slots are read
pytestmark = pytest.mark.usefixtures("cpu")


def stirred(**fields: Any):
    """A model whose compression functions are no longer as they start."""
    model = tiny_model(**fields).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".compression" in name:
                parameter.add_(torch.randn_like(parameter) / 3)
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {"compression": "mean"},
        {"compression": "dilated", "compression_loss": "auto-encoding"},
        {"compression": "attention", "compression_heads": 2, "compressed_scale": "free"},
        {"compression": "most-used"},
    ],
    ids=lambda fields: fields["compression"],
)
def test_the_network_equals_one_built_so_with_the_parameters_of_both(fields):
    network, donor = stirred(), stirred(seed=1, **fields)
    changed = with_compression(network, donor)
    built = tiny_model(seed=2, **fields).eval()
    parameters = {name: value for name, value in network.state_dict().items() if ".compression" not in name}
    donated = {name: value for name, value in donor.state_dict().items() if ".compression" in name}
    built.load_state_dict({**parameters, **donated})
    assert changed.config == built.config
    assert torch.equal(changed(TOKENS).logits, built(TOKENS).logits)
    assert not torch.equal(changed(TOKENS).logits, network(TOKENS).logits)
    theirs = {id(parameter) for model in (network, donor) for parameter in model.parameters()}
    assert {id(parameter) for parameter in changed.parameters()} <= theirs


def test_the_donors_lengths_of_memory_and_positions_stay_its_own():
    network = stirred()
    donor = stirred(seed=1, memory_length=6, compressed_length=7, segment_length=5, position="rotary", norm="post")
    changed = with_compression(network, donor)
    assert changed.config == network.config
    assert changed.blocks[1].compression is not network.blocks[1].compression
    assert torch.equal(changed.blocks[1].compression.weight, donor.blocks[1].compression.weight)


def test_functions_come_to_the_precision_of_the_network():
    changed = with_compression(stirred().double(), stirred(seed=1))
    assert {parameter.dtype for parameter in changed.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 20}, "d_model is 20 there and 16 here"),
        ({"n_layers": 3}, "n_layers is 3 there and 2 here"),
        ({"compression_rate": 2}, r"compression_rate by layer is \[2, 2\] there and \[3, 3\] here"),
        ({"compressed_length": (0, 4)}, r"compressed memory by layer is \[False, True\] there and \[True, True\] here"),
    ],
)
def test_functions_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(CompressiveError, match=message):
        with_compression(tiny_model(), tiny_model(**fields))


@pytest.fixture(scope="module")
def settings(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of settings of one experiment: two convolutions, trained differently, and mean pooling."""
    out = tmp_path_factory.mktemp("transfer")
    plan = {
        "seeds": [0, 1],
        "baseline": "conv",
        "model": {**MODEL, "compression": "conv"},
        "train": {**TRAINING, "steps": 4, "validate_every": 0, "sample_every": 0},
        "evaluate": {"split": "test", "tokens": 200, "memory_length": 6},
        "settings": {
            "conv": {},
            "faster": {"train": {"compression_learning_rate": 1e-1}},
            "mean": {"model": {"compression": "mean"}},
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        for run in read_plan(plan, corpus).runs():
            if run.seed == 0 or run.setting.name == "conv":
                finish(run, corpus, out)
    return out / "runs"


def test_the_script_scores_each_network_with_four_functions(settings, corpus, capsys):
    example = runpy.run_path(str(EXAMPLE))
    example["main"](str(settings / "faster"), str(settings / "conv"), str(corpus.path))
    printed = json.loads(capsys.readouterr().out)
    result = json.loads((settings / "conv/seed-0" / RESULT).read_text(encoding="utf-8"))
    own, other, mean, initial = printed["transfer"]
    assert printed["seeds"] == [0]  # the only one that both have
    assert own["bits_per_byte"] == [result["score"]["bits_per_byte"]]
    assert other["bits_per_byte"] != own["bits_per_byte"]
    assert other["difference"] == pytest.approx(other["bits_per_byte"][0] - own["bits_per_byte"][0])
    assert initial["bits_per_byte"] == pytest.approx(mean["bits_per_byte"], rel=1e-6)  # a convolution starts so
    assert printed["command"].endswith(f"{settings / 'faster'} {settings / 'conv'} {corpus.path}")


def test_functions_put_into_their_own_networks_change_nothing(settings, corpus):
    found = runpy.run_path(str(EXAMPLE))["transfer"](settings / "conv", settings / "conv", corpus)
    own, other = found["transfer"][:2]
    assert found["seeds"] == [0, 1]
    assert own["bits_per_byte"] == other["bits_per_byte"]
    assert other["difference_over_runs"] == (0, 0)


def test_the_script_refuses_what_cannot_be_transferred(settings, corpus, tmp_path):
    transfer = runpy.run_path(str(EXAMPLE))["transfer"]
    with pytest.raises(CompressiveError, match="compression 'mean' has nothing that it learns to transfer"):
        transfer(settings / "mean", settings / "conv", corpus)
    with pytest.raises(CompressiveError, match="no finished seed in common"):
        transfer(tmp_path, settings / "conv", corpus)
    other = open_corpus(corpus.path)
    object.__setattr__(other, "fingerprint", "another")
    with pytest.raises(CompressiveError, match="was trained on another corpus than"):
        transfer(settings / "faster", settings / "conv", other)


def test_the_script_scores_two_settings_by_frequency_and_by_position(settings, corpus, capsys):
    example = runpy.run_path(str(EXAMPLE.with_name("buckets.py")))
    example["main"](str(settings / "conv"), str(settings / "faster"), str(corpus.path))
    printed = json.loads(capsys.readouterr().out)
    assert printed["seeds"] == [0]  # the only one that both have
    for name in ("conv", "faster"):
        score = json.loads((settings / name / "seed-0" / RESULT).read_text(encoding="utf-8"))["score"]
        side = "baseline" if name == "conv" else "setting"
        for rows in printed["buckets"].values():
            assert sum(row["bytes"] for row in rows) == score["bytes"]
            assert sum(row["nats"][side][0] for row in rows) == pytest.approx(score["nats"], rel=1e-9)
    for rows in printed["buckets"].values():
        for row in rows:
            nats = row["nats"]["setting"][0] - row["nats"]["baseline"][0]
            assert row["difference"] == pytest.approx(nats / math.log(2) / row["bytes"], abs=1e-12)
