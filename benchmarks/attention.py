"""Timing of the attention core against the classical form of Transformer-XL.

    python benchmarks/attention.py --threads 1 2

Three forms of one work, on the tensors that the package itself makes of a full memory: `relative_attention`
as training calls it on a CPU, `masked_attention`, and the classical form (einsum, then pad and reshape) over as
many keys in unit steps. They run in turn, A B C A B C ..., so that whatever else the machine does meets all of
them. Writes attention.json beside this file and the table of docs/attention.md.

Where PyTorch finds a GPU they run there instead, FlexAttention with them, in fp32; that goes to attention-gpu.json, and
the table is printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from compressive_transformer import ModelConfig
from compressive_transformer.attention import RelativeAttention, masked_attention, relative_attention
from compressive_transformer.attention.positions import relative_positions
from compressive_transformer.memory import SlotLayout
from machine import DEVICE, cpu, wait

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "attention.json", HERE.parent / "docs" / "attention.md"
BEGIN, END = "<!-- attention figures -->", "<!-- end of attention figures -->"
GPU_RESULTS = HERE / "attention-gpu.json"
CLASSICAL, FLEX = "classical", "flex_attention"
FORMS = {
    "relative_attention": "`relative_attention`",
    "masked_attention": "`masked_attention`",
    FLEX: "`flex_attention`",
    CLASSICAL: CLASSICAL,
}
PASSES = {"both": "forward and backward", "forward": "forward, no gradient"}


@dataclass(frozen=True)
class Work:
    """Sizes of the attention of one layer with full memory that reads a segment."""

    batch: int
    segment_length: int
    memory_length: int
    compressed_length: int
    compression_rate: int
    n_heads: int
    d_head: int

    def __str__(self) -> str:
        slots = f"{self.compressed_length} + {self.memory_length} + {self.segment_length}"
        return f"batch {self.batch}, {slots} slots, {self.n_heads} heads of {self.d_head}"

    @property
    def config(self) -> ModelConfig:
        """Model of one layer with these sizes."""
        return ModelConfig(
            vocab_size=1,
            d_model=self.n_heads * self.d_head,
            n_layers=1,
            n_heads=self.n_heads,
            segment_length=self.segment_length,
            memory_length=self.memory_length,
            compressed_length=self.compressed_length,
            compression_rate=self.compression_rate,
        )


WORKS = {
    "S": Work(4, 256, 256, 128, 4, n_heads=8, d_head=32),
    "L": Work(2, 512, 512, 512, 4, n_heads=8, d_head=64),
}


@dataclass(frozen=True)
class Inputs:
    """Arguments of the forms of attention; every tensor but the mask needs a gradient."""

    content: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor
    grids: list[tuple[Tensor, Tensor, int]]
    shifted: Tensor
    """Queries with the position bias, as the classical form takes them `[batch, query, head, d_head]`."""
    table: Tensor
    """One projected sinusoid a key, largest distance first `[key, head, d_head]`."""


def make_inputs(work: Work) -> Inputs:
    """Return random states of a segment and of a full memory, projected by `RelativeAttention`."""
    torch.manual_seed(0)
    config, layout = work.config, SlotLayout.of(work.config, 0)
    attention, slots = RelativeAttention(config, 0), config.attention_width
    beyond = config.temporal_range
    seen = torch.full((work.batch,), -(-beyond // work.segment_length) * work.segment_length)
    assert [int(count[0]) for count in layout.filled(seen)] == [work.compressed_length, work.memory_length]
    states = torch.randn(work.batch, slots, config.d_model)
    lengths = torch.full((work.batch,), work.segment_length)
    positions = relative_positions(config, layout, seen=seen, lengths=lengths, chunk=work.segment_length, like=states)
    queries = attention._heads(attention.query(states[:, -work.segment_length :]))
    keys, values = attention.keys_values(states)
    made = [attention._relative(queries, grid, positions, compressed=False) for grid in positions.grids]
    grids = [(_leaf(shifted), _leaf(rows), count) for shifted, rows, count in made]
    rows = grids[-1][1][0, 0, :-1]  # down to distance 0; the one that is left out lies in the future
    table = torch.cat([torch.randn(slots - len(rows), *rows.shape[1:]), rows])
    return Inputs(
        content=_leaf(attention._scaled(queries + attention.content_bias, keys)),
        keys=_leaf(keys),
        values=_leaf(values),
        mask=positions.mask.to(DEVICE),
        grids=grids,
        shifted=_leaf(attention._scaled(queries + attention.position_bias, keys)),
        table=_leaf(table),
    )


def classical_attention(inputs: Inputs) -> Tensor:
    """Return the attention of Dai et al. (2019) in its usual form: scores by einsum, shift by padding and reshaping."""
    content = torch.einsum("bihd,bjhd->bhij", inputs.content, inputs.keys)
    position = torch.einsum("bihd,jhd->bhij", inputs.shifted, inputs.table)
    batch, heads, queries, keys = position.shape
    padded = functional.pad(position, (1, 0)).view(batch, heads, keys + 1, queries)
    position = padded[:, :, 1:].view(batch, heads, queries, keys)
    weights = torch.softmax(content + position + inputs.mask[:, None], dim=-1)
    return torch.einsum("bhij,bjhd->bihd", weights, inputs.values)


def flexible(inputs: Inputs, attend: Callable[..., Tensor] = flex_attention) -> Callable[[], Tensor]:
    """Return the same score with PyTorch's FlexAttention, which shifts by lookup and skips blocks in the future."""
    queries, slots = inputs.content.shape[1], inputs.keys.shape[1]
    counts = [count for *_, count in inputs.grids]
    allowed = create_block_mask(
        lambda batch, head, query, slot: slot <= query + slots - queries, None, None, queries, slots, device=DEVICE
    )

    def run() -> Tensor:
        scores = [torch.einsum("gbahd,gbmhd->bhgam", asked, _as(rows, asked)) for asked, rows, _ in inputs.grids]

        def relative(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            for part, first, count in zip(scores, (0, counts[0]), counts, strict=False):
                step, places, rows = part.shape[2:]
                row = places - 1 - query // step + slot - first
                # What the clamp changes lies in another grid or in the future.
                found = part[batch, head, query % step, query // step, row.clamp(0, rows - 1)]
                score = score + torch.where((slot >= first) & (slot < first + count), found, 0)
            return score

        states = (part.transpose(1, 2) for part in (inputs.content, inputs.keys, inputs.values))
        return attend(*states, score_mod=relative, block_mask=allowed, scale=1.0).transpose(1, 2)

    return run


def forms_of(inputs: Inputs, attend: Callable[..., Tensor] | None = None) -> dict[str, Callable[[], Tensor]]:
    """Return the forms as functions without arguments; FlexAttention as `attend`, if given."""
    i = inputs
    return {
        **({FLEX: flexible(inputs, attend)} if attend else {}),
        "relative_attention": lambda: relative_attention(i.content, i.keys, i.values, i.mask, i.grids),
        "masked_attention": lambda: masked_attention(i.content, i.keys, i.values, i.mask, i.grids),
        CLASSICAL: lambda: classical_attention(i),
    }


@torch.no_grad()
def check_agreement() -> None:
    """Assert that equivalent forms agree: all in a Transformer-XL, otherwise all but the classical one."""
    for work in (Work(2, 8, 8, 0, 1, n_heads=2, d_head=4), Work(2, 8, 8, 4, 2, n_heads=2, d_head=4)):
        inputs = make_inputs(work)
        # FlexAttention refuses what wants a gradient on a CPU.
        free = {name: getattr(inputs, name).detach() for name in ("content", "keys", "values")}
        forms = forms_of(replace(inputs, **free), flex_attention)
        if work.compressed_length:
            forms.pop(CLASSICAL)
        wanted = forms["masked_attention"]()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            for name, form in forms.items():
                torch.testing.assert_close(form(), wanted, msg=lambda text, name=name: f"{name} is another: {text}")


def time_work(work: Work, repetitions: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return milliseconds of each pass and form: median, min and max over the repetitions."""
    # On a CPU it has no backward pass.
    attend = torch.compile(flex_attention, dynamic=False) if DEVICE.type == "cuda" else None
    forms = forms_of(make_inputs(work), attend)
    gradient = torch.randn_like(forms[CLASSICAL]())
    results = {}
    for kind in PASSES:
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for repetition in range(repetitions + 1):
            for name, form in forms.items():
                took = _time(form, gradient if kind == "both" else None)
                if repetition:  # the first round warms up
                    seconds[name].append(took)
        results[kind] = {name: _summary(values) for name, values in seconds.items()}
    return results


def table_of(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table, with the machine."""
    head = ["work", "threads", "pass", "form", "median, ms", "min – max, ms", "time / classical"]
    lines = [" | ".join(head), " | ".join(["---"] * 4 + ["---:"] * 3)]
    for entry in results["entries"]:
        for kind, forms in entry["milliseconds"].items():
            for name, took in forms.items():
                ratio = took["median"] / forms[CLASSICAL]["median"]
                spread = f"{took['min']:.1f} – {took['max']:.1f}"
                cells = [entry["work"], str(entry["threads"]), PASSES[kind], FORMS[name]]
                lines.append(" | ".join([*cells, f"{took['median']:.1f}", spread, f"{ratio:.2f}"]))
    works = "; ".join(f"{name}: {work}" for name, work in results["works"].items())
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    below = f"{works}. fp32, {results['repetitions']} repetitions; {results['cpu']}, {versions}."
    return "\n".join(f"| {line} |" for line in lines) + "\n\n" + below


def replace_table(page: str, table: str) -> str:
    """Return the page with `table` between its two markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page must hold {BEGIN} and, further down, {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def measure(threads: Iterable[int], repetitions: int) -> dict[str, Any]:
    """Return all results for JSON."""
    entries = []
    for count in threads:
        torch.set_num_threads(count)
        for name, work in WORKS.items():
            print(f"{name} ({work}), {count} thread(s)", flush=True)
            entries.append({"work": name, "threads": count, "milliseconds": time_work(work, repetitions)})
    return {
        "works": {name: str(work) for name, work in WORKS.items()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "cpu": torch.cuda.get_device_name() if DEVICE.type == "cuda" else cpu(),
        "repetitions": repetitions,
        "entries": entries,
    }


def main() -> None:
    """Measure, write the JSON, and replace the table in the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads to measure with")
    parser.add_argument("--repetitions", type=int, default=15, help="rounds of all forms, after one to warm up")
    on_gpu = DEVICE.type == "cuda"
    parser.add_argument("--out", type=Path, default=GPU_RESULTS if on_gpu else RESULTS, help="the JSON to write")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page whose table is replaced")
    given = parser.parse_args()
    page = given.page.read_text(encoding="utf-8")
    replace_table(page, "")  # fails before anything is measured
    check_agreement()
    results = measure(given.threads, given.repetitions)
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not on_gpu:
        given.page.write_text(replace_table(page, table_of(results)), encoding="utf-8")
    print(table_of(results))


def _leaf(states: Tensor) -> Tensor:
    return states.detach().clone().contiguous().to(DEVICE).requires_grad_()


def _as(rows: Tensor, asked: Tensor) -> Tensor:
    """Expand rows `[step, 1 or batch, row, head, d_head]` to the lanes of `asked [step, batch, a, head, d_head]`."""
    return rows.expand(-1, asked.shape[1], -1, -1, -1)


def _time(form: Callable[[], Tensor], gradient: Tensor | None) -> float:
    began = time.perf_counter()
    if gradient is None:
        with torch.no_grad():
            form()
    else:
        form().backward(gradient)
    wait()
    return time.perf_counter() - began


def _summary(seconds: list[float]) -> dict[str, float]:
    values = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {name: round(1000 * value, 3) for name, value in values.items()}


if __name__ == "__main__":
    main()
