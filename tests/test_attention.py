"""Relative attention: two forms of one score, both equal to a loop over pairs. Rotary attention: rotations."""

from __future__ import annotations

import pytest
import torch

from compressive_transformer.attention import KERNELS, cpu, masked_attention, relative_attention, rotated
from compressive_transformer.attention.positions import relative_positions, rotary_positions
from compressive_transformer.attention.relative import plain_scores
from compressive_transformer.errors import CompressiveError
from compressive_transformer.model import CompressiveTransformer, with_lengths
from reference import sinusoid
from small import assert_close, layered, random_tokens, small_config, small_model


def random_problem(*, step=3, per_lane=True, seed=0):
    """Six queries of two lanes over 4 compressed and 9 other slots, rows shared by the lanes or not."""
    generator = torch.Generator().manual_seed(seed)
    lanes, queries, heads = (2 if per_lane else 1), 6, 3

    def tensor(*shape):
        return torch.randn(*shape, heads, 2, generator=generator).double().requires_grad_()

    content, keys, values = tensor(2, queries), tensor(2, 13), tensor(2, 13)
    places = queries // step
    compressed = (tensor(step, 2, places), tensor(step, lanes, places + 4 - 1), 4)
    recent = (
        tensor(1, 2, queries),
        tensor(1, lanes, 3 + queries + 1),
        9,
    )  # three recent slots, six of the segment
    readable = torch.ones(2, queries, 13).bool()
    readable[:, :, 7:] = torch.ones(queries, queries).bool().tril()
    readable[1, :, :2] = False  # lane 1 has unfilled slots
    readable[1, :, 4] = False
    mask = torch.zeros(readable.shape).double().masked_fill(~readable, -torch.inf)
    return content, keys, values, mask, [compressed, recent]


def tensors_of(problem):
    content, keys, values, _, grids = problem
    return [content, keys, values, *(part for queries, rows, _ in grids for part in (queries, rows))]


def looped_attention(content, keys, values, mask, grids):
    """One pair of a query and a slot at a time."""
    batch_size, queries, heads, _ = content.shape
    mixed = torch.zeros_like(content)
    for b, i, h in ((b, i, h) for b in range(batch_size) for i in range(queries) for h in range(heads)):
        scores, slot = [], 0
        for grid_queries, rows, count in grids:
            step, place = grid_queries.shape[0], i // grid_queries.shape[0]
            for at in range(count):
                if mask[b, i, slot] == 0:
                    lane = b if rows.shape[1] > 1 else 0
                    row = rows[i % step, lane, queries // step - 1 - place + at, h]
                    relative = grid_queries[i % step, b, place, h] @ row
                    scores.append((content[b, i, h] @ keys[b, slot, h] + relative, slot))
                slot += 1
        weights = torch.softmax(torch.stack([score for score, _ in scores]), 0)
        mixed[b, i, h] = sum(w * values[b, s, h] for w, (_, s) in zip(weights, scores, strict=True))
    return mixed


each_problem = pytest.mark.parametrize("per_lane", [True, False])
each_step = pytest.mark.parametrize("step", [1, 2, 3, 6])


@each_step
@each_problem
@pytest.mark.parametrize("form", [relative_attention, masked_attention])
def test_scores_equal_a_loop_over_pairs(form, per_lane, step):
    problem = random_problem(step=step, per_lane=per_lane)
    with torch.no_grad():
        assert_close(form(*problem), looped_attention(*problem))


@each_step
@each_problem
def test_the_form_for_cpus_equals_the_form_for_gpus_and_so_do_all_gradients(per_lane, step):
    problem = random_problem(step=step, per_lane=per_lane)
    one, other = relative_attention(*problem), masked_attention(*problem)
    assert_close(one, other)
    weight = torch.randn_like(one)
    gradients = [torch.autograd.grad((mixed * weight).sum(), tensors_of(problem)) for mixed in (one, other)]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.any()
        assert_close(ours, theirs)


@pytest.mark.parametrize("block", [1, 2, 4])
@each_step
@each_problem
def test_blocks_of_queries_change_no_output_gradient_or_weight(per_lane, step, block, monkeypatch):
    problem = random_problem(step=step, per_lane=per_lane)

    def step_of(form):
        told = []
        mixed = form(*problem, told.append)
        return [mixed, *torch.autograd.grad(mixed.square().sum(), tensors_of(problem)), *told]

    expected = step_of(masked_attention)
    monkeypatch.setattr(cpu, "BLOCK", block)
    for ours, theirs in zip(step_of(relative_attention), expected, strict=True):
        assert_close(ours, theirs)


@each_problem
def test_finite_differences_agree(per_lane):
    content, keys, values, mask, grids = random_problem(step=3, per_lane=per_lane)

    def mixed(content, keys, values, *parts):
        changed = [(*parts[2 * at : 2 * at + 2], slots) for at, (*_, slots) in enumerate(grids)]
        return relative_attention(content, keys, values, mask, changed)

    assert torch.autograd.gradcheck(mixed, tensors_of((content, keys, values, mask, grids)))


@each_problem
def test_without_gradient_the_output_is_the_same(per_lane):
    problem = random_problem(per_lane=per_lane)
    with torch.no_grad():
        assert torch.equal(relative_attention(*problem), relative_attention(*random_problem(per_lane=per_lane)))
    assert torch.equal(relative_attention(*problem).detach(), relative_attention(*problem))


def test_gradients_are_right_where_only_some_are_wanted():
    problem = random_problem()
    expected = torch.autograd.grad(relative_attention(*problem).sum(), problem[2])
    for tensor in tensors_of(problem):
        tensor.requires_grad_(tensor is problem[2])
    assert_close(torch.autograd.grad(relative_attention(*problem).sum(), problem[2])[0], expected[0])


def test_all_that_a_mask_hides_takes_exactly_no_gradient():
    problem = random_problem()
    _, keys, values, mask, _ = problem
    hidden = mask.isinf().all(1)  # [batch, slot]
    gradients = torch.autograd.grad(relative_attention(*problem).square().sum(), (keys, values))
    for gradient in gradients:
        assert torch.equal(gradient.ne(0).flatten(2).any(2), ~hidden)


@each_step
@each_problem
@pytest.mark.parametrize("form", [relative_attention, masked_attention])
def test_the_callback_gets_the_weights_that_mix_the_values(form, per_lane, step):
    problem, told = random_problem(step=step, per_lane=per_lane), []
    _, _, values, mask, _ = problem
    mixed = form(*problem, told.append)
    assert torch.equal(mixed, form(*problem))
    assert len(told) == values.shape[2]
    for head, weights in enumerate(told):
        assert not weights.requires_grad
        assert_close(weights.sum(-1), torch.ones(2, 6).double())
        assert not weights[mask.expand_as(weights).isinf()].any()
        assert_close(weights @ values[:, :, head], mixed[:, :, head])


@pytest.mark.parametrize("block", [2, 128])
@pytest.mark.parametrize("fields", [{}, {"compressed_position": "unit"}, {"segment_length": 7}], ids=str)
def test_a_whole_model_is_the_same_with_either_form(fields, block, monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK", block)
    model, tokens = small_model(**fields), random_tokens(2, 50)

    def step():
        memory = model(tokens[:, :22], None, torch.tensor([5, 22])).memory
        output = model(tokens[:, 22:], memory)
        loss = output.logits.square().mean() + output.compression_loss
        return [output.logits, *torch.autograd.grad(loss, list(model.parameters()))]

    ours = step()
    for block in model.blocks:
        block.attention.kernel = KERNELS["sdpa"]
    for one, other in zip(ours, step(), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [relative_attention, masked_attention])
def test_half_precision_is_close(form, dtype):
    content, keys, values, mask, grids = random_problem()
    halved = [(queries.to(dtype), rows.to(dtype), slots) for queries, rows, slots in grids]
    mixed = form(content.to(dtype), keys.to(dtype), values.to(dtype), mask.to(dtype), halved)
    assert mixed.dtype == dtype
    assert_close(mixed.double(), relative_attention(content, keys, values, mask, grids), 0.05)


# --- rotary ---


def angles_of(places, width):
    """`[1, place, width]`: all sines, then all cosines."""
    return torch.stack([sinusoid(place, width) for place in places])[None]


def test_each_pair_of_a_head_is_turned_by_its_angle():
    states, places = torch.randn(2, 3, 2, 6).double(), [-7, 0, 2.5]
    turned = rotated(states, angles_of(places, 6))
    for at, place in enumerate(places):
        for k in range(3):
            angle = torch.tensor(place * 10_000 ** (-2 * k / 6), dtype=torch.float64)
            matrix = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
            assert_close(turned[:, at, :, [k, k + 3]], states[:, at, :, [k, k + 3]] @ matrix.T, 1e-14)


def test_rotary_scores_depend_on_distances_only():
    queries, keys = torch.randn(2, 1, 4, 1, 8).double()
    scores = [
        torch.einsum(
            "bihd,bjhd->bhij",
            rotated(queries, angles_of([moved + 3, moved + 4, moved + 5, moved + 6], 8)),
            rotated(keys, angles_of([moved - 4.5, moved - 1, moved, moved + 6], 8)),
        )
        for moved in (0, 17, -1000)
    ]
    for moved in scores[1:]:
        assert_close(moved, scores[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_in_half_precision_are_turned_in_single_precision(dtype):
    states, angles = torch.randn(2, 4, 2, 8).to(dtype), angles_of([-900, -3, 0, 400], 8).float()
    turned = rotated(states, angles)
    assert turned.dtype == dtype
    assert torch.equal(turned, rotated(states.float(), angles).to(dtype))


def test_rotary_attention_has_projections_and_nothing_else():
    names = {name for name, _ in small_model(position="rotary").blocks[0].attention.named_parameters()}
    assert names == {"query.weight", "key_value.weight", "output.weight"}


def test_the_callback_gets_the_weights_of_rotary_attention():
    model, told = small_model(position="rotary", n_layers=1), []
    attention, memory = model.blocks[0].attention, model(random_tokens(2, 22)).memory
    slots = torch.cat([memory.layers[0].compressed, memory.layers[0].recent, torch.randn(2, 4, 8).double()], dim=1)
    positions = rotary_positions(
        model.config,
        model.layouts[0],
        seen=torch.tensor([20, 8]),
        lengths=torch.tensor([4, 4]),
        chunk=4,
        like=slots,
    )
    projected = attention.project(slots[:, -4:], slots)
    mixed = attention(projected, positions, told.append)
    assert torch.equal(mixed, attention(projected, positions))
    _, values = attention.keys_values(slots)
    for weights in told:
        assert not weights.requires_grad
        assert not weights[positions.mask.expand_as(weights).isinf()].any()
    heads = [weights @ values[:, :, head] for head, weights in enumerate(told)]
    assert_close(attention.output(torch.cat(heads, dim=-1)), mixed)


@layered
def test_the_fast_forms_give_the_plain_scores(fields):
    model = small_model(**{**fields, "n_heads": 1})
    stream = random_tokens(1, 40)
    memory = model(stream[:, :36]).memory
    for layer, layout in enumerate(model.layouts):
        attention, seen, width = model.blocks[layer].attention, 36, layout.segment_length - 36 % layout.segment_length
        compressed, recent = layout.slot_spans(seen)
        pending = range(seen - seen % layout.segment_length, seen + width)
        spans = [*compressed, *recent, *(range(token, token + 1) for token in pending)]
        places = torch.tensor([(span.start + span.stop - 1) / 2 if span else seen + 99.0 for span in spans])
        states = torch.randn(1, len(spans), 8).double()
        weights = []
        positions = relative_positions(
            model.config, layout, seen=memory.seen, lengths=torch.tensor([width]), chunk=width, like=states
        )
        projected = attention.project(states[:, -width:], states)
        attention(projected, positions, weights.append)
        expected = plain_scores(
            projected.queries[0],
            projected.keys_values[0, :, :8],
            torch.arange(seen, seen + width)[:, None] - places,
            attention.content_bias[0],
            attention.position_bias[0],
            attention.position.weight,
        )
        assert_close(weights[0][0, :width], expected.softmax(1))


def test_an_unknown_kernel_or_one_for_rotary_positions_is_refused():
    with pytest.raises(CompressiveError, match=r"attention \('flash'\) must be 'auto' or 'cpu' or 'sdpa'"):
        CompressiveTransformer(small_config(), attention="flash")
    with pytest.raises(CompressiveError, match=r"attention \('sdpa'\) must be 'auto' with position = 'rotary'"):
        CompressiveTransformer(small_config(position="rotary"), attention="sdpa")


def test_kernels_give_the_same_logits_and_derived_models_keep_theirs():
    tokens, auto = random_tokens(2, 30), small_model()
    for name in KERNELS:
        model = CompressiveTransformer(auto.config, attention=name).double()
        model.load_state_dict(auto.state_dict())
        assert_close(model(tokens).logits, auto(tokens).logits)
        assert with_lengths(model, memory_length=7).attention == name
