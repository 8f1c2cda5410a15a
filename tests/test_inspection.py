"""What an inspection shows is what the model computed: against the reference, the evaluation, and the page itself."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import tracemalloc
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import check_site
import reference
from compressive_transformer.apps import inspection
from compressive_transformer.apps.inspection import Inspection, InspectionReport, inspect_text
from compressive_transformer.apps.inspection.attention import age_buckets
from compressive_transformer.apps.inspection.contrast import Contrast, Reading, contrast
from compressive_transformer.data import Corpus, Split
from compressive_transformer.data.tokenizers import ByteTokenizer, train_bpe
from compressive_transformer.errors import CompressiveError
from compressive_transformer.evaluate import ByFrequency, evaluate
from compressive_transformer.evaluate.reconstruction import measure_reconstruction
from compressive_transformer.generate.stream import Stream
from compressive_transformer.memory import SlotLayout
from compressive_transformer.model import CompressiveTransformer, with_lengths
from runs import tiny_model
from small import POSITIONS

BOOK = (files("compressive_transformer.apps.demo") / "sample/test/356.txt").read_text(encoding="utf-8")
TEXT = BOOK[400:436]  # whole segments and a part of one

KINDS: dict[str, dict[str, Any]] = {
    **{"-".join(fields.values()): fields for fields in POSITIONS},
    "most-used": {"compression": "most-used"},
    "per layer": {
        "memory_length": (0, 9),
        "compressed_length": (3, 5),
        "compression_rate": (2, 5),
        "compression": "conv",
    },
    "zero here": {"compressed_length": (0, 4), "norm": "post"},
    "Transformer-XL": {"compressed_length": 0},
    "zeros": {"empty_slots": "zeros"},
}
SLOW = tuple(KINDS)[:3]  # the other kinds are relative-span
each_kind = pytest.mark.parametrize(
    "fields",
    [pytest.param(fields, id=kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind, fields in KINDS.items()],
)


def altered_model(**fields: Any) -> CompressiveTransformer:
    """A tiny model in double precision whose attention is far from even, and f_c from mean pooling."""
    model = tiny_model(**fields).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


class Watched(reference.Lane):
    """Remembers which tokens most-used kept, and the usage of all that was evicted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        layers = range(self.c.n_layers)
        self.kept: list[list[int]] = [[] for _ in layers]
        self.usage: list[list[float]] = [[] for _ in layers]
        self.squares = torch.zeros(self.c.n_layers, 3).double()

    def compress(self, layer: int, evicted: list[Any], usage: list[float], following: Any) -> list[Any]:
        new: list[Any] = super().compress(layer, evicted, usage, following)
        first = len(self.usage[layer])
        self.kept[layer] += [first + at for one in new for at, state in enumerate(evicted) if state is one]
        self.usage[layer] += usage
        rate = self.rate[layer]
        means = [sum(evicted[at : at + rate]) / rate for at in range(0, len(evicted), rate)]
        means = [self.matched(mean, evicted[g * rate : (g + 1) * rate]) for g, mean in enumerate(means)]
        zeros = [torch.zeros_like(state) for state in new]
        for at, states in enumerate((new, means, zeros) if new else ()):
            self.squares[layer, at] += self.reconstruction(layer, evicted, states)
        return new

    def slots(self, layer: int, query: int) -> list[tuple[str, int, range]]:
        """Tier, place and tokens, the start counted, of all that the query of a token may read, as `weights` has it."""
        n_s, n_m, n_cm, rate = self.c.segment_length, self.n_m[layer], self.n_cm[layer], self.rate[layer]
        committed = query - query % n_s
        groups, first = self.counts(layer, committed)
        recent = SlotLayout.of(self.c, layer).recent_length
        found = []
        for g in range(groups - n_cm, groups):
            tokens = range(g * rate, (g + 1) * rate)
            if self.c.compression == "most-used" and g >= 0:
                tokens = range(self.kept[layer][g], self.kept[layer][g] + 1)
            if g >= 0 or self.c.empty_slots == "zeros":
                found.append(("compressed", n_cm - (groups - g), tokens if g >= 0 else range(0)))
        empty = committed - n_m if self.c.empty_slots == "zeros" else 0
        for token in [*range(min(empty, 0), 0), *range(first, query + 1)]:
            tier, place = (
                ("recent", recent - committed + token) if token < committed else ("segment", token - committed)
            )
            found.append((tier, place, range(token, token + 1) if token >= 0 else range(0)))
        return found


def read_by_reference(model: CompressiveTransformer, text: str) -> tuple[Watched, list[float]]:
    lane, ids = Watched(model.config, dict(model.named_parameters())), list(text.encode())
    with torch.no_grad():
        logits = lane.read([256, *ids[:-1]])
    return lane, torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="none").tolist()


@each_kind
def test_numbers_are_those_of_the_reference(fields: dict[str, Any]) -> None:
    model = altered_model(**fields)
    found = inspect_text(model, ByteTokenizer(), TEXT, tokens=[0, 7, 8, len(TEXT) - 1], spread=3)
    lane, nats = read_by_reference(model, TEXT)
    # Cross-entropy is single precision, as everywhere in the package.
    assert found.nats.tolist() == pytest.approx(nats, abs=1e-5)
    if not any(lane.n_cm):
        assert found.nats_without is None
    else:
        without = with_lengths(model, compressed_length=0)
        assert found.nats_without is not None
        assert found.nats_without.tolist() == pytest.approx(read_by_reference(without, TEXT)[1], abs=1e-5)
        assert abs(found.nats_without - found.nats).max() > 1e-2
        assert found.reconstruction is not None
        errors = lane.squares[:, :2] / lane.squares[:, 2:].clamp(min=1e-300)
        assert found.reconstruction.error == pytest.approx(errors[:, 0].tolist(), abs=1e-9)
        assert found.reconstruction.mean_pooling == pytest.approx(errors[:, 1].tolist(), abs=1e-9)
    assert_attention_is_that_of(lane, found)
    if fields.get("compression") == "most-used":
        assert_kept_is_that_of(lane, found)


def assert_attention_is_that_of(lane: Watched, found: Inspection) -> None:
    """By age over all tokens, and slot by slot for those that were chosen."""
    for layer, attention in enumerate(found.attention):
        sums = np.zeros((lane.c.n_heads, len(attention.buckets)))
        for query, rows in enumerate(lane.weights[layer]):
            slots = lane.slots(layer, query)
            for head, weights in enumerate(rows):
                for (tier, place, _), weight in zip(slots, weights, strict=True):
                    of_tier = [n for n, bucket in enumerate(attention.buckets) if bucket.tier == tier]
                    (bucket,) = [n for n in of_tier if place in range(*attention.buckets[n][1:3])]
                    sums[head, bucket] += weight
        np.testing.assert_allclose(attention.heads, sums / len(found.nats), atol=1e-9)
        np.testing.assert_allclose(np.sum(attention.heads, axis=1), 1, atol=1e-9)
    assert {0, 7, 8, len(TEXT) - 1} <= {token.token for token in found.tokens}
    for token in found.tokens:
        for layer, read in enumerate(token.layers):
            rows, slots = np.array(lane.weights[layer][token.token]), lane.slots(layer, token.token)
            for own, weights in zip((read.mean, *read.heads), (rows.mean(0), *rows), strict=True):
                for tier in ("compressed", "recent", "segment"):
                    expected = [(w, p, s) for w, (t, p, s) in zip(weights, slots, strict=True) if t == tier]
                    assert getattr(own, tier) == pytest.approx(sum(w for w, *_ in expected), abs=1e-9)
                    best = sorted(expected, key=lambda one: -one[0])[: inspection.attention.SLOTS_KEPT]
                    kept = [slot for slot in own.slots if slot.tier == tier]
                    assert [slot.weight for slot in kept] == pytest.approx([w for w, *_ in best], abs=1e-9)
                    spans = {place: span for _, place, span in expected}
                    for slot in kept:
                        assert (slot.first, slot.stop) == (spans[slot.place].start - 1, spans[slot.place].stop - 1)


def assert_kept_is_that_of(lane: Watched, found: Inspection) -> None:
    assert found.kept is not None
    assert [states.layer for states in found.kept] == list(range(lane.c.n_layers))
    for states in found.kept:
        kept, usage = lane.kept[states.layer], lane.usage[states.layer]
        assert (states.tokens + 1).tolist() == kept
        assert states.evicted == len(usage)
        heads_and_tokens = [value for at, value in enumerate(usage) if at not in kept]
        assert states.usage == pytest.approx(np.mean([usage[at] for at in kept]), abs=1e-9)
        assert states.usage_of_others == pytest.approx(np.mean(heads_and_tokens), abs=1e-9)


def test_numbers_agree_with_stream_and_evaluation(corpus: Corpus) -> None:
    model, split = altered_model(), corpus.test
    number = 0
    text = corpus.tokenizer.decode(split.read(number))
    found = inspect_text(model, corpus.tokenizer, text)
    assert found.nats.tolist() == pytest.approx(Stream(model, corpus.tokenizer).score(text).tolist(), abs=1e-6)
    scored = evaluate(model, split)
    assert found.nats.sum() == pytest.approx(scored.documents[number][1].nats, rel=1e-9)
    assert found.bits_per_byte == pytest.approx(scored.documents[number][1].bits_per_byte, rel=1e-9)
    without = evaluate(with_lengths(model, compressed_length=0), split).documents[number][1].nats
    assert found.nats_without is not None
    assert found.nats_without.sum() == pytest.approx(without, rel=1e-9)
    alone = only(split, number)
    measured = measure_reconstruction(model, alone)
    assert found.reconstruction is not None
    assert found.reconstruction.error == pytest.approx(measured.error, rel=1e-9)


def only(split: Split, number: int) -> Split:
    assert number == 0
    return replace(split, documents=split.documents[:1])


def test_attention_of_the_tokens_that_gain_most_is_kept() -> None:
    model = altered_model()
    found = inspect_text(model, ByteTokenizer(), BOOK[:200], spread=5)
    assert found.nats_without is not None
    gains = found.nats_without - found.nats
    kept = {token.token for token in found.tokens}
    assert set(np.argsort(-gains)[:5].tolist()) <= kept
    assert {(2 * at + 1) * 200 // 10 for at in range(5)} <= kept
    assert len(kept) <= 10
    assert inspect_text(model, ByteTokenizer(), BOOK[:50], spread=0).tokens == ()


def test_the_model_is_unchanged(corpus: Corpus) -> None:
    model = altered_model(compression="most-used", dropout=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (inspect_text(model, ByteTokenizer(), TEXT) for _ in range(2))
    assert first.nats.tolist() == second.nats.tolist()
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("slots", [0, 1, 4, 6, 7, 64])
def test_the_buckets_of_a_layer_hold_each_slot_once(slots: int) -> None:
    layout = SlotLayout(segment_length=8, memory_length=9, compressed_length=slots, compression_rate=3)
    buckets = age_buckets(layout)
    for tier, length in (("compressed", slots), ("recent", layout.recent_length), ("segment", 8)):
        places = [place for b in buckets if b.tier == tier for place in range(b.first, b.stop)]
        assert places == list(range(length))
        assert sum(b.tier == tier for b in buckets) == min(6, length)


def test_labels_of_ages_are_those_of_the_slots() -> None:
    layout = SlotLayout(segment_length=6, memory_length=6, compressed_length=4, compression_rate=3)
    seen = 60  # full, and nothing waits
    compressed, recent = layout.slot_spans(seen)
    for bucket in age_buckets(layout):
        low, high = numbers_of(bucket.label)
        if bucket.tier == "segment":
            assert (low, high) == (bucket.first + 1, bucket.stop)
        else:
            spans = (compressed if bucket.tier == "compressed" else recent)[bucket.first : bucket.stop]
            assert (low, high) == (seen - spans[-1][-1], seen - spans[0][0])


def numbers_of(label: str) -> tuple[int, int]:
    numbers = [int(number) for number in re.findall(r"\d+", label)]
    return numbers[0], numbers[-1]


# --- two readings ---


def total_of(found: Contrast, side: str, buckets: Any) -> float:
    return sum(getattr(bucket, side) * bucket.bytes for bucket in buckets)


def test_all_bits_and_bytes_are_in_buckets_of_any_tokenizer() -> None:
    text = "  " + BOOK[1000:1260] + " naïve \U0001d49c end \n"
    bpe = train_bpe([BOOK[:5_000]], 400)
    one = inspect_text(altered_model(), ByteTokenizer(), text)
    other = inspect_text(altered_model(vocab_size=bpe.vocab_size, seed=1), bpe, text)
    found = contrast(one.reading, other.reading)
    for side, inspected in (("first", one), ("second", other)):
        assert total_of(found, side, found.by_position) == pytest.approx(inspected.nats.sum() / math.log(2))
    assert sum(bucket.bytes for bucket in found.by_position) == len(text.encode())
    assert sum(bucket.words for bucket in found.by_position) == len(text.split())
    assert [bucket.label for bucket in found.by_position] == ["0–63", "64–127", "128–255", "256–511"]
    differences = [word.difference for word in found.first_better]
    assert differences == sorted(differences, reverse=True)
    assert min(differences) > 0 > max(word.difference for word in found.second_better)
    turned = contrast(other.reading, one.reading)
    assert [(w.text, w.place, -w.difference) for w in turned.second_better] == [
        (w.text, w.place, pytest.approx(w.difference)) for w in found.first_better
    ]
    for word in found.first_better:
        assert text[word.place : word.place + len(word.text)] == word.text


def test_buckets_by_frequency_are_those_of_an_evaluation(corpus: Corpus) -> None:
    model, frequency = altered_model(), ByFrequency(corpus, (30, 3))
    split = only(corpus.test, 0)
    found = inspect_text(model, corpus.tokenizer, corpus.tokenizer.decode(split.read(0))).gain(frequency)
    assert found is not None
    assert found.by_frequency is not None
    expected = evaluate(model, split, by=[frequency]).buckets["by_frequency"]
    for bucket, (label, score) in zip(found.by_frequency, expected, strict=True):
        assert (bucket.label, bucket.words, bucket.bytes) == (label, score.words, score.bytes)
        assert bucket.first == pytest.approx(score.bits_per_byte, rel=1e-9)


def test_texts_that_differ_are_refused() -> None:
    one, other = (inspect_text(tiny_model(), ByteTokenizer(), text) for text in ("one text", "another"))
    with pytest.raises(CompressiveError, match="do not read the same text, since one tokenizer is lossy"):
        InspectionReport(one, other)


def test_a_text_without_words_has_no_words_to_list(corpus: Corpus) -> None:
    found = inspect_text(altered_model(), ByteTokenizer(), "\n \n" * 20)
    gain = found.gain(ByFrequency(corpus, (3,)))
    assert gain is not None
    assert (gain.first_better, gain.second_better, gain.by_position, gain.by_frequency) == ((), (), (), None)
    InspectionReport(found, frequency=ByFrequency(corpus, (3,))).to_dict()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "the text is empty: there is nothing to read"),
        ("abc", {"tokens": [3]}, r"token \(3\) must lie in 0 .. 2, the tokens of the text"),
        ("abc", {"tokens": [-1]}, r"token \(-1\) must lie in 0 .. 2"),
        ("abc", {"spread": -1}, r"spread \(-1\) must be 0 or more"),
        ("a\ud800", {}, "lone surrogate"),
    ],
)
def test_invalid_input_is_refused(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressiveError, match=message):
        inspect_text(tiny_model(), ByteTokenizer(), text, **options)


def test_a_model_whose_numbers_are_not_finite_is_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.embedding.weight[ord(TEXT[9])] = torch.nan
    with pytest.raises(
        CompressiveError, match=r"probability of token \d of the text is not finite; the weights may be"
    ):
        inspect_text(model, ByteTokenizer(), TEXT)


@pytest.mark.parametrize(
    ("compression", "note"),
    [
        ("mean", ""),
        ("conv-overlap", "conv-overlap also reads the state that follows the group of a compressed slot"),
        ("dilated", "dilated also reads up to 7 states before a group, those of the same commit"),
        ("most-used", "most-used keeps states unchanged: a compressed slot stands for one token, any of its commit"),
    ],
)
def test_a_slot_note_names_other_states_read(compression: str, note: str) -> None:
    assert inspect_text(tiny_model(compression=compression), ByteTokenizer(), TEXT[:9]).slot_note == note
    assert inspect_text(tiny_model(compressed_length=0), ByteTokenizer(), "x").slot_note == ""


# --- what is held ---

LONG = {"segment_length": 100, "memory_length": 100, "compressed_length": 40}


def test_memory_use_is_a_few_numbers_a_token() -> None:
    model, peaks, tables = altered_model(compression="most-used", **LONG), [], []
    inspect_text(model, ByteTokenizer(), TEXT)
    for length in (500, 2000):
        tracemalloc.start()
        found = inspect_text(model, ByteTokenizer(), BOOK[:length], spread=4)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(found.tokens) <= 8
        tables.append(found)
    assert (peaks[1] - peaks[0]) / 1500 < 400
    sizes = [sum(len(bucket) for layer in found.attention for bucket in layer.heads) for found in tables]
    assert sizes[0] == sizes[1]


# --- the page ---

HOSTILE = (
    "<b>bold</b> </script><script>alert(1)</script> <!-- <script> --> <img src=x onerror=alert(1)> \"quotes\" 'and' & "
    "&amp; {{data}} \\ \\u003c line\u2028end\u2029 \x00\x07\x1b[31m \u202eright to left\u202c שלום مرحبا "
    "\U0001d49c\U0001d4eb é\u0301 end\n"
)


class Page(HTMLParser):
    """The elements of a page outside of its figures, and the contents of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.policy = self.title = ""
        self.handlers: list[str] = []
        self._in: str = ""
        self.feed(re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self._in = tag
        if tag == "script":
            self.scripts.append("")
        if tag == "meta" and dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        if self._in == "title":
            self.title += data

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


class Shown(NamedTuple):
    """A report, and the page that it wrote."""

    report: InspectionReport
    page: Page
    data: dict[str, Any]
    text: str
    folder: Path


def write(report: InspectionReport, folder: Path) -> Shown:
    pytest.importorskip("matplotlib", reason="the page needs the extra `plot`")
    report.write(folder / "report.html")
    assert [path.name for path in folder.iterdir()] == ["report.html"]
    text = (folder / "report.html").read_text(encoding="utf-8")
    parsed = Page(text)
    return Shown(report, parsed, json.loads(parsed.scripts[0]), text, folder)


NAMES = {"name": "</script><b>", "against_name": '"><img src=x>', "text_name": "<i>{{data}}</i> & </title>"}


@pytest.fixture(scope="module")
def shown(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Two runs with different tokenizers on a hostile text, and an earlier page of that name is replaced."""
    folder = tmp_path_factory.mktemp("shown")
    bpe = train_bpe([BOOK[:5_000]], 400)
    one = inspect_text(altered_model(compression="most-used"), ByteTokenizer(), HOSTILE, spread=4)
    other = inspect_text(altered_model(vocab_size=bpe.vocab_size, compressed_length=0), bpe, HOSTILE, spread=4)
    (folder / "report.html").write_text("earlier")
    return write(InspectionReport(one, other, ByFrequency(corpus, (30, 3)), **NAMES), folder)


def column(packed: str, kind: str) -> Any:
    return np.frombuffer(base64.b64decode(packed), dtype=kind)


def test_the_page_has_the_numbers_of_the_model(shown: Shown) -> None:
    table = shown.report.to_dict()
    json.dumps(table, allow_nan=False)
    for run, expected, (_, found) in zip(shown.data["runs"], table["runs"], shown.report.runs, strict=True):
        np.testing.assert_allclose(column(run["bits"], "<f4"), found.nats / math.log(2), rtol=1e-6)
        if found.nats_without is not None:
            np.testing.assert_allclose(column(run["without"], "<f4"), found.nats_without / math.log(2), rtol=1e-6)
        assert run["attention"] == [
            {"buckets": [list(bucket.values()) for bucket in layer["buckets"]], "heads": layer["heads"]}
            for layer in expected["attention"]
        ]
        for packed, token in zip(run["tokens"], expected["tokens"], strict=True):
            assert packed["token"] == token["token"]
            for own, layer in zip(packed["layers"], token["layers"], strict=True):
                for (compressed, *_, slots), head in zip(own, (layer["mean"], *layer["heads"]), strict=True):
                    assert compressed == pytest.approx(head["compressed"], abs=1e-7)
                    assert [slot[:2] + slot[3:] for slot in slots] == [
                        [s["tier"], s["place"], s["first"], s["stop"]] for s in head["slots"]
                    ]


def test_the_page_has_kept_states_and_places_of_words(shown: Shown) -> None:
    one, data, run = shown.report.inspection, shown.data, shown.data["runs"][0]
    assert one.kept is not None
    counts = np.zeros(len(one.nats))
    for states in one.kept:
        counts[states.tokens[states.tokens >= 0]] += 1
    assert column(run["kept"]["counts"], "<u2").tolist() == counts.tolist()
    # A JavaScript string counts units of UTF-16.
    in_units = data["text"].encode("utf-16-le")
    ends = column(run["ends"], "<u4").tolist()
    pieces = [in_units[2 * a : 2 * b].decode("utf-16-le") for a, b in zip([0, *ends], ends, strict=False)]
    starts = [*one.pieces.starts.tolist(), len(one.pieces.text)]
    assert pieces == [one.pieces.text[a:b] for a, b in pairwise(starts)]
    gain = one.gain()
    assert gain is not None
    for word, own in zip(run["gain"]["first_better"], gain.first_better, strict=True):
        assert in_units[2 * word["place"] :].decode("utf-16-le").startswith(own.text)


def test_text_from_users_is_never_markup(shown: Shown) -> None:
    page = shown.page
    assert not {"b", "i", "img"} & set(page.tags)
    assert page.tags.count("script") == 2
    assert page.handlers == []
    assert shown.data["text"] == HOSTILE
    assert [run["name"] for run in shown.data["runs"]] == [NAMES["name"], NAMES["against_name"]]
    assert page.title == f"Memory report: {NAMES['text_name']}"
    assert not set(page.scripts[0]) & set("<>&\u2028\u2029\x00")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", shown.text)


def test_the_page_loads_nothing_and_may_not(shown: Shown) -> None:
    assert list(check_site.check(shown.folder)) == []
    assert not {"link", "img", "iframe", "object", "embed", "video", "audio", "form"} & set(shown.page.tags)
    script = base64.b64encode(hashlib.sha256(shown.page.scripts[1].encode()).digest()).decode()
    assert shown.page.policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; base-uri 'none'; "
        "form-action 'none'"
    )


def test_a_figure_without_data_says_so_and_why(tmp_path: Path) -> None:
    plain = inspect_text(tiny_model(compressed_length=0), ByteTokenizer(), TEXT)
    reason = "the model has no compressed memory (compressed_length is 0 in every layer)"
    assert plain.missing == dict.fromkeys(("nats_without", "reconstruction", "kept"), reason)
    own = write(InspectionReport(plain), tmp_path)
    assert f'<p class="missing">No data: {reason}.</p>' in own.text
    assert own.data["runs"][0]["missing"] == plain.missing
    assert own.data["runs"][0]["gain"] is own.data["runs"][0]["without"] is own.data["runs"][0]["kept"] is None
    assert own.data["words"] is own.data["comparison"] is None
    short = inspect_text(tiny_model(), ByteTokenizer(), TEXT[:12])
    assert short.missing["reconstruction"].startswith("the text is too short: no state left recent memory")
    assert short.missing["kept"].startswith("compression = 'conv-overlap' makes new states")
    assert short.reconstruction is None


def test_page_size_is_a_few_bytes_a_token() -> None:
    pytest.importorskip("matplotlib", reason="the page needs the extra `plot`")
    from compressive_transformer.apps.inspection.page import as_script, data_of

    model, sizes = altered_model(**LONG), []
    for length in (500, 2000):
        report = InspectionReport(inspect_text(model, ByteTokenizer(), BOOK[:length], spread=2))
        sizes.append(len(as_script(data_of(report))))
    # The character itself, and three columns of four bytes as base64; words and slots differ a little.
    assert (sizes[1] - sizes[0]) / 1500 < 20


def test_two_runs_are_compared_word_by_word(shown: Shown) -> None:
    (_, one), (_, other) = shown.report.runs
    difference = column(shown.data["words"]["difference"], "<f4")
    assert len(difference) == len(HOSTILE.split())
    assert difference.sum() * math.log(2) == pytest.approx(other.nats.sum() - one.nats.sum(), rel=1e-4)
    assert shown.text.count("<svg") == 4  # one curve, ages twice, errors of the one that compresses
    assert str(shown.report).splitlines()[-1].endswith(f"{other.bits_per_byte - one.bits_per_byte:+.4f}")
    expected = contrast(one.reading, Reading(other.pieces, other.nats), shown.report.frequency)
    assert shown.report.to_dict()["comparison"] == expected.to_dict()


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    report = InspectionReport(inspect_text(tiny_model(), ByteTokenizer(), TEXT))
    with pytest.raises(CompressiveError, match=r"is a folder: give the page a name, such as report.html"):
        report.write(tmp_path)
    with pytest.raises(CompressiveError, match=r"the folder .*nowhere does not exist; create it first"):
        report.write(tmp_path / "nowhere" / "report.html")


def test_without_matplotlib_the_page_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = InspectionReport(inspect_text(tiny_model(), ByteTokenizer(), TEXT))
    with pytest.raises(CompressiveError, match=r"a report needs the library matplotlib: pip install .*\[plot\]"):
        report.write(tmp_path / "report.html")
    assert report.to_dict()["runs"]
