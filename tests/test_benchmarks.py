"""The benchmark's own parts, without other packages: turns, ratios, counts, pages that say what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attention
import goals
import page
import tables
import timing
from classical import Classical, ClassicalTransformerXL, relative_shift
from compressive_transformer import CompressiveError
from compressive_transformer.evaluate import describe
from contenders import Ours, WithoutCompression
from timing import Decoding, Spread, fraction, interleave, ratio
from works import IDS, WORKS, Work, decoding_bytes, full_memory, multiply_adds, segments

SMALL = Work(
    2, n_layers=2, d_model=8, n_heads=2, segment_length=8, memory_length=8, compressed_length=4, compression_rate=2
)
PEERS = tuple(goals.TITLES)
pytestmark = pytest.mark.usefixtures("cpu")


def results() -> dict[str, Any]:
    """Made-up results: with ours at 1 second, the peers at 2, 3, 4 and 5 in one round and at twice that in another."""

    def seconds(unit: float) -> dict[str, list[float]]:
        own = {"ours": [unit, 2 * unit], "ours without compression": [0.8 * unit, 1.6 * unit]}
        return own | {peer: [(2 + at) * unit, 2 * (2 + at) * unit] for at, peer in enumerate(PEERS)}

    def entry(measure: str, **fields: Any) -> dict[str, Any]:
        return {
            "measure": measure,
            "work": "S",
            "threads": 2,
            "batch": 4,
            "tokens": 1024,
            "seconds": seconds(1.0),
        } | fields

    limit = {"limit": {"multiply_adds": 10.0, "seconds": [1.0, 2.0]}, "needed_multiply_adds": 8.0}
    read = {"needed_bytes": 5.0, "bytes": 10.0, "seconds": [0.001, 0.002]}
    decoding = {"limits": {"ours": read}, "seconds": seconds(0.001), "commit_seconds": seconds(0.0025)}
    grown = {"training": {"1": [1e-3, 3e-3], "4": [4e-3, 4e-3]}}
    return {
        "format": 1,
        "quick": False,
        "made": {"commit": "abc", "cpu": "A processor", "cores": 2, "instructions": "AVX2", "versions": {"torch": "2"}},
        "minutes": 20.0,
        "works": {"S": {"text": str(WORKS["S"])}},
        "entries": [
            entry("training", **limit, skipped={"ours, bf16": "it has none"}),
            entry("scoring", **limit),
            entry("decoding", batch=1, tokens=1, **decoding),
            entry("decoding", batch=8, tokens=8, **decoding),
            {
                "measure": "memory",
                "work": "S",
                "threads": 2,
                "batch": 4,
                "bytes": {"ours": [4.0e8], **{peer: [1.0e9] for peer in PEERS}},
                "bytes_before": {name: [2.0e8] for name in ("ours", *PEERS)},
            },
        ],
        "growth": [
            {
                "axis": "depth",
                "threads": 2,
                "seconds_a_token": grown,
                "multiply_adds_a_token": {"training": {"1": 5.0, "4": 20.0}},
            }
        ],
        "stream": {"work": "small", "threads": 2, "rows": [{"tokens": 10, "seconds": [0.5], "resident_bytes": 2**20}]},
        "decoding_along": {"threads": 2, "seconds": {"768": [1.0, 1.0], "1000": [1.05, 1.05]}},
        "profile": {
            "work": "S",
            "threads": 1,
            "seconds_a_step": 1.5,
            "operations": [{"name": "aten::mm", "share": 0.4, "calls": 7.0}],
        },
    }


def cells(part: str, first: str) -> list[str]:
    """The cells of the row of a table that begins with `first`."""
    row = next(line for line in part.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_runs_take_turns_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def run(name: str, takes: float) -> Callable[[], None]:
        def step() -> None:
            order.append(name)
            clock[0] += takes * len(order)

        return step

    seconds = interleave({"a": run("a", 1), "b": run("b", 10)}, rounds=2)
    assert "".join(order) == "abab"
    assert seconds == {"a": [1, 3], "b": [20, 40]}


def test_ratios_compare_within_a_round() -> None:
    assert ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == Spread(3.0, 2.0, 4.0)
    # 6 needed in 2 seconds are 3 a second; the limit did 8 in 2 seconds, then 8 in 1.
    assert fraction(6, [2.0, 2.0], limit=[2.0, 1.0], done=8) == Spread(0.5625, 0.375, 0.75)


def test_decoding_is_timed_at_four_places_and_its_commit_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, began = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def decoder(batch: int, at: int) -> timing.Step:
        began.append(at)
        place = at

        def step(tokens: Tensor) -> Tensor:
            nonlocal place
            place += 1
            clock[0] += 100.0 if place == 64 else 1.0
            return torch.zeros(len(tokens), 3)

        return step

    decoding = Decoding(decoder, 2, length=64, tokens=4)
    decoding.run()
    assert began == [8, 24, 40, 56, 61]
    assert decoding.ordinary == [1.0]
    assert decoding.commit == [100.0]


def test_forms_of_attention_are_one() -> None:
    attention.check_agreement()


def test_multiply_adds_are_those_of_describe() -> None:
    cost = describe(SMALL.config).total
    shared = cost.position_multiply_adds / SMALL.batch
    assert multiply_adds(SMALL.config, SMALL.batch, training=False) == pytest.approx(cost.multiply_adds)
    forward = cost.multiply_adds + shared + cost.loss_multiply_adds
    assert 2 * forward < multiply_adds(SMALL.config, SMALL.batch, training=True) < 3 * forward


def test_decoding_reads_weights_once_and_the_slots_of_each_lane() -> None:
    config, described = SMALL.config, describe(SMALL.config)
    weights = described.total.parameters
    slots = 8 + 4 + (1 + 8) / 2  # of recent and compressed memory, and the mean of a segment
    states = 2 * slots * config.d_model * config.n_layers
    assert decoding_bytes(config, 1, weight=4, state=4) == 4 * weights + 4 * states
    assert decoding_bytes(config, 3, weight=1, state=2) == weights + 3 * 2 * states


def test_segments_are_text_whose_targets_are_the_next_bytes() -> None:
    pieces = segments(2, 16)
    (first, targets), (second, _) = next(pieces), next(pieces)
    assert first.shape == targets.shape == (2, 16)
    assert torch.equal(first[:, 1:], targets[:, :-1])
    assert torch.equal(targets[:, -1], second[:, 0])
    assert bytes(first[0].tolist()).decode().strip()


def test_works_are_as_wide_with_and_without_compression() -> None:
    for work in WORKS.values():
        assert work.without_compression.attention_width == work.config.attention_width
        assert work.without_compression.compressed_length == 0


@pytest.mark.parametrize("contender", [Ours, WithoutCompression, Classical])
def test_contenders_do_their_whole_work(contender: type[Ours]) -> None:
    one = contender(SMALL)
    one.check()
    before = [parameter.clone() for parameter in one.model.parameters()]
    one.train()
    assert all(not torch.equal(now, was) for now, was in zip(one.model.parameters(), before, strict=True))
    one.score()
    for decoder in one.decoders().values():
        assert decoder(3, 5)(torch.zeros(3, dtype=torch.int64)).shape == (3, IDS)


def test_a_contender_that_skips_work_is_refused() -> None:
    frozen = Ours(SMALL)
    frozen.model.blocks[1].attention.key_value.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"^ours: no gradient reaches blocks\.1\.attention\.key_value\.weight$"):
        frozen.check()
    empty = Ours(SMALL)
    empty.memory = empty.model.empty_memory(SMALL.batch)
    with pytest.raises(RuntimeError, match=r"^ours: layers must have 12 filled slots, not \{0\}$"):
        empty.check()
    without = Ours(replace(SMALL, memory_length=12, compressed_length=0))
    with pytest.raises(RuntimeError, match=r"^ours: there is nothing that compresses$"):
        without.check()


def test_random_full_memory_stays_full() -> None:
    model = Ours(SMALL).model
    memory = full_memory(model, 3)
    after = model(torch.zeros(3, SMALL.segment_length, dtype=torch.int64), memory).memory
    for layout in model.layouts:
        for one in (memory, after):
            assert [count.tolist() for count in layout.filled(one.seen)] == [[4] * 3, [8] * 3]


def test_the_relative_shift_moves_rows_by_distance() -> None:
    scores = torch.arange(3 * 7).view(3, 7, 1, 1)
    shifted = relative_shift(scores)[..., 0, 0]
    for i in range(3):
        for j in range(7 - 2 + i):
            assert shifted[i, j] == scores[i, j + 2 - i]


def test_the_classical_model_reads_alike_at_once_and_one_by_one() -> None:
    torch.manual_seed(0)
    model = ClassicalTransformerXL(replace(SMALL, memory_length=20)).double()
    tokens = torch.randint(0, IDS, (2, 9))
    memory = [torch.zeros(0, 2, SMALL.d_model, dtype=torch.float64)] * SMALL.n_layers
    at_once, _ = model(tokens, memory)
    for place, token in enumerate(tokens.split(1, dim=1)):
        logits, memory = model(token, memory)
        torch.testing.assert_close(logits[:, 0], at_once[:, place], rtol=0, atol=1e-10)


def test_a_goal_is_met_if_all_medians_reach_it() -> None:
    near, far = Spread(2.0, 1.0, 9.0), Spread(3.0, 3.0, 3.0)
    assert goals.Goal("", "", 2, at_most=False, reached={1: near, 2: far}).met is True
    assert goals.Goal("", "", 2.5, at_most=False, reached={1: near, 2: far}).met is False
    assert goals.Goal("", "", 2.5, at_most=True, reached={1: near}).met is True
    assert goals.Goal("", "", 2.5, at_most=True, reached={}).met is None


def test_goals_are_judged_by_the_figures() -> None:
    met = {goal.what: goal.met for goal in goals.goals(results())}
    assert met["training S, fp32, against compressive-transformer-pytorch"] is True  # 2 of at least 1.6
    assert met["training S, fp32, against classical Transformer-XL"] is True  # 5 of at least 2.4
    assert met["decoding S, fp32, against compressive-transformer-pytorch"] is False
    assert met["training S, bf16, against labml-nn"] is None
    assert met["memory S, fp32, against labml-nn"] is True  # 0.4 of at most 0.45
    assert met["share of compression in training S"] is False  # a quarter more
    assert met["training S, fp32, share of the machine's limit"] is True  # 8 of 10 in the same time
    assert met["decoding S, fp32, share of the machine's limit"] is False
    assert met["decoding S, batch 8 against batch 1, tokens a second"] is True
    assert met["decoding S, a commit in ordinary tokens"] is True
    assert met["decoding S, a token late in the stream against an early one"] is True


def test_tables_say_what_the_results_say() -> None:
    made_up = results()
    training = cells(page.PARTS["training"](made_up), "S")
    assert training[3:6] == ["fp32", "768 (512 to 1,024)", "0.80 (0.80 to 0.80)"]
    assert [cell.partition(" ")[0] for cell in training[6:]] == ["2.00", "3.00", "4.00", "5.00"]
    assert cells(page.PARTS["memory"](made_up), "S | labml-nn")[2:] == [
        "954 (954 to 954)",
        "191",
        "0.40 (0.40 to 0.40)",
    ]
    assert cells(tables.compression(made_up), "S")[-1] == "+25.0 % (+25.0 % to +25.0 %)"
    assert cells(tables.growth(made_up), "4")[1:] == ["4,000 (4,000 to 4,000)", "2.00", "4.00"]
    assert cells(tables.profile(made_up, None), "`aten::mm`")[1:] == ["40.0 %", "7"]
    assert cells(tables.peers(made_up), "decoding S, batch 8")[1] == "5,333 tokens/s"
    assert "ours, bf16: it has none" in tables.made(made_up)


def test_pages_have_every_part_of_the_committed_results() -> None:
    stored = json.loads(page.RESULTS.read_text(encoding="utf-8")) if page.RESULTS.exists() else None
    found = []
    for path in page.PAGES:
        text = path.read_text(encoding="utf-8")
        found += [match[1] for match in page.PLACE.findall(text)]
        assert page.fill(text, stored) == text, f"python benchmarks/page.py writes {path.name} anew"
        assert page.fill(page.fill(text, results()), stored) == text
    assert sorted(found) == sorted(page.PARTS)
    assert stored is None or not stored["quick"]


def test_a_part_that_there_is_not_is_refused() -> None:
    with pytest.raises(CompressiveError, match=r"^'speed' is no part of the results; parts are summary, peers, "):
        page.fill("<!-- performance: speed -->\n<!-- end of performance -->", None)


def test_a_failed_write_leaves_pages_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("<!-- performance: made -->\n<!-- end of performance -->", encoding="utf-8")
    bad.write_text("<!-- performance: no -->\n<!-- end of performance -->", encoding="utf-8")
    monkeypatch.setattr(page, "PAGES", (good, bad))
    before = good.read_text(encoding="utf-8")
    with pytest.raises(CompressiveError):
        page.write_pages(results())
    assert good.read_text(encoding="utf-8") == before
