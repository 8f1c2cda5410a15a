"""The model in transformers equals the package's model, however it is called."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from compressive_transformer.config import ModelConfig
from compressive_transformer.errors import CompressiveError
from compressive_transformer.generate import CachedDecoder
from compressive_transformer.hf import (
    CompressiveTransformerCache,
    CompressiveTransformerConfig,
    CompressiveTransformerForCausalLM,
)
from compressive_transformer.hf.compat import CACHE_NAME
from compressive_transformer.memory import Memory
from compressive_transformer.model import CompressiveTransformer, next_token_loss
from small import assert_close, assert_same_memory, each_position, random_tokens, small_model

START = 10  # the last of eleven ids
LENGTHS = (14, 4, 9, 1)
EITHER_SIDE = pytest.mark.parametrize("side", ["left", "right"])


def wrapped(**fields: object) -> CompressiveTransformerForCausalLM:
    return CompressiveTransformerForCausalLM.from_core(small_model(**fields)).eval()


def texts(batch_size: int, length: int, *, seed: int = 0) -> Tensor:
    """Return random ids that start a document, without another start."""
    tokens = random_tokens(batch_size, length, seed=seed) % START
    tokens[:, 0] = START
    return tokens


def padded(rows: Tensor, side: str = "left") -> tuple[Tensor, Tensor]:
    """Return rows cut to LENGTHS, with padding of random ids, and the attention mask."""
    columns = max(LENGTHS)
    ids, mask = random_tokens(len(rows), columns, seed=9), torch.zeros(len(rows), columns, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        real = slice(columns - length, None) if side == "left" else slice(length)
        ids[row, real], mask[row, real] = rows[row, :length], 1
    return ids, mask


def memory_of(cache: CompressiveTransformerCache) -> Memory:
    assert cache.memory is not None
    return cache.memory


@each_position
def test_logits_are_those_of_the_packages_model(position: dict[str, str]) -> None:
    model, tokens = wrapped(**position), texts(2, 30)
    output, expected = model(tokens), model.model(tokens)
    assert torch.equal(output.logits, expected.logits)
    assert_same_memory(model.model, memory_of(output[CACHE_NAME]), expected.memory, 0)


def test_one_token_at_a_time_equals_the_packages_model_to_the_bit() -> None:
    model, tokens = wrapped(), texts(1, 26)
    cache, memory = CompressiveTransformerCache(), model.model.empty_memory(1)
    for token in tokens.split(1, dim=1):
        expected = model.model(token, memory)
        memory = expected.memory
        assert torch.equal(model(token, **{CACHE_NAME: cache}).logits, expected.logits)
    assert cache.get_seq_length() == 26


def test_both_names_of_the_cache_mean_the_same() -> None:
    model, tokens = wrapped(), texts(1, 30)
    for names in (["past_key_values"], ["cache"], ["past_key_values", "cache"]):
        cache = model(tokens[:, :20])[CACHE_NAME]
        assert_close(model(tokens[:, 20:], **dict.fromkeys(names, cache)).logits, model(tokens).logits[:, 20:])
    # `generate` before transformers 5.24 gives both names in its second iteration.
    expected = generate(model, tokens)
    assert torch.equal(generate(model, tokens, cache=CompressiveTransformerCache()), expected)


@EITHER_SIDE
@each_position
def test_padding_never_enters_memory_and_rows_equal_those_read_alone(side: str, position: dict[str, str]) -> None:
    model, rows = wrapped(**position), texts(4, 14)
    ids, mask = padded(rows, side)
    output = model(ids, attention_mask=mask)
    for row, length in enumerate(LENGTHS):
        alone = model(rows[row : row + 1, :length])
        assert_close(output.logits[row, mask[row].bool()], alone.logits[0])
        lane = memory_of(output[CACHE_NAME]).select(torch.tensor([row]))
        assert_same_memory(model.model, lane, memory_of(alone[CACHE_NAME]))


@EITHER_SIDE
def test_logits_to_keep_are_the_last_of_all_logits(side: str) -> None:
    model = wrapped()
    ids, mask = padded(texts(4, 14), side)
    whole = model(ids, attention_mask=mask)
    for keep in (1, 3, 10):
        kept = model(ids, attention_mask=mask, logits_to_keep=keep)
        assert kept.logits.shape[1] == keep
        real = mask[:, -keep:].bool()
        assert_close(kept.logits[real], whole.logits[:, -keep:][real])
        assert_same_memory(model.model, memory_of(kept[CACHE_NAME]), memory_of(whole[CACHE_NAME]))


def test_loss_is_the_shifted_mean_and_adds_the_compression_loss_in_training() -> None:
    model, tokens = wrapped(), texts(2, 30)
    expected = model.model(tokens)
    task = next_token_loss(expected.logits[:, :-1], tokens[:, 1:])
    assert_close(model(tokens, labels=tokens).loss, task)
    compression = expected.compression_loss / 8  # 30 tokens are 8 segments of at most 4
    output = model.train()(tokens, labels=tokens)
    assert_close(output.loss, task + compression)
    assert_close(output.compression_loss, compression)
    output.loss.backward()
    functions = [parameter for name, parameter in model.named_parameters() if "compression." in name]
    assert functions
    assert all(bool(parameter.grad.any()) for parameter in functions)


@EITHER_SIDE
def test_loss_counts_no_padding_and_no_ignored_label(side: str) -> None:
    model, rows = wrapped(), texts(4, 14)
    ids, mask = padded(rows, side)
    labels = ids.clone()  # padding is not marked here: the mask says enough
    labels[0, 5] = -100
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, length in enumerate(LENGTHS):
        targets = labels[row, mask[row].bool()][1:]
        alone = model(rows[row : row + 1, :length]).logits[0]
        total += torch.nn.functional.cross_entropy(alone[:-1], targets, reduction="sum")
        count += int((targets != -100).sum())
    assert_close(model(ids, attention_mask=mask, labels=labels).loss, total / count)


def test_losses_of_micro_batches_add_up_to_the_mean_over_all_targets() -> None:
    model, tokens = wrapped(compression_loss="none", compression="mean").train(), texts(4, 20)
    items = torch.tensor(4 * 19)
    parts = [model(part, labels=part, num_items_in_batch=items).loss for part in tokens.split([1, 3])]
    assert_close(sum(parts), model(tokens, labels=tokens).loss)


def test_checkpointing_of_activations_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True, None):
        model, tokens = wrapped(compression_loss="bptt").train(), texts(2, 30)
        if checkpointing is not False:
            switch(model, "enable")()
            assert model.model.gradient_checkpointing == 1
        if checkpointing is None:
            switch(model, "disable")()
            assert not model.model.gradient_checkpointing
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert len({len(named) for named in gradients}) == 1
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            assert (gradient is None) == (other[name] is None)
            if gradient is not None:
                assert_close(other[name], gradient)
    with pytest.raises(CompressiveError, match="use_reentrant must be False"):
        switch(wrapped(), "enable")({"use_reentrant": True})


def switch(model: Any, way: str) -> Any:
    """Return the method, by the name that gives no warning in this release of transformers."""
    new, old = f"activation_checkpointing_{way}", f"gradient_checkpointing_{way}"
    return getattr(model, new if hasattr(model, new) else old)


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(ids, **{"max_new_tokens": 6, "attention_mask": torch.ones_like(ids), **options})


WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 4, "num_return_sequences": 3},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_generation_with_the_cache_equals_generation_without(way: dict[str, Any]) -> None:
    model = wrapped()
    ids, mask = padded(texts(4, 14))
    given = {**way, "attention_mask": mask, "return_dict_in_generate": True, "output_scores": True}
    cached, plain = generate(model, ids, **given), generate(model, ids, **given, use_cache=False)
    assert torch.equal(cached.sequences, plain.sequences)
    assert START not in cached.sequences[:, ids.shape[1] :]
    for scores, expected in zip(cached.scores, plain.scores, strict=True):
        assert_close(scores, expected, 1e-5)  # transformers takes scores in single precision


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_model_reads_the_prompt_and_a_decoder_what_is_generated(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped()
    ids, mask = padded(texts(4, 14))
    calls: list[int] = []
    read = CompressiveTransformer.forward

    def counted(self: CompressiveTransformer, tokens: Tensor, *rest: Any) -> Any:
        calls.append(tokens.shape[1])
        return read(self, tokens, *rest)

    monkeypatch.setattr(CompressiveTransformer, "forward", counted)
    for new in (3, 12):
        generate(model, ids, attention_mask=mask, max_new_tokens=new, **way)
        assert sum(calls) == ids.shape[1]
        calls.clear()


def test_a_second_call_with_one_cache_uses_the_weights_of_that_moment() -> None:
    model, ids = wrapped(), texts(1, 14)
    cache = CompressiveTransformerCache()
    first = generate(model, ids, **{CACHE_NAME: cache})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.1)  # leaves no trace in the tensor's version
    read, token, expected = copy.copy(cache), first[:, -1:], []
    for _ in range(6):
        logits = model(token, **{CACHE_NAME: read}).logits[:, -1]
        logits[:, START] = float("-inf")
        token = logits.argmax(-1, keepdim=True)
        expected.append(token.item())
    seen = torch.ones_like(first)
    second = generate(model, first[:, -1:], attention_mask=seen, **{CACHE_NAME: cache})
    assert second[0, 1:].tolist() == expected


def test_copies_of_a_cache_that_generated_are_independent() -> None:
    model, ids = wrapped(), texts(2, 14)
    cache = CompressiveTransformerCache()
    generate(model, ids, **{CACHE_NAME: cache})
    copies = [copy.copy(cache), copy.deepcopy(cache)]
    following = random_tokens(2, 5, seed=4)
    logits = model(following, **{CACHE_NAME: cache}).logits
    for other in copies:
        assert other.get_seq_length() == 19
        assert torch.equal(model(following, **{CACHE_NAME: other}).logits, logits)


def test_half_precision_generates_from_rows_with_padding() -> None:
    model = wrapped().bfloat16()
    ids, mask = padded(texts(4, 14))
    for way in WAYS.values():
        assert generate(model, ids, attention_mask=mask, **way).shape[1] == ids.shape[1] + 6


def test_greedy_text_of_rows_with_padding_is_that_of_each_row_alone() -> None:
    model, rows = wrapped(), texts(4, 14)
    ids, mask = padded(rows)
    together = generate(model, ids, attention_mask=mask)
    for row, length in enumerate(LENGTHS):
        alone = generate(model, rows[row : row + 1, :length])
        assert together[row, ids.shape[1] :].tolist() == alone[0, length:].tolist()


@pytest.mark.parametrize("only_new", [False, True], ids=["all ids", "new ids"])
@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_second_generate_continues_with_the_same_memory(only_new: bool, way: dict[str, Any]) -> None:
    model = wrapped()
    ids, mask = padded(texts(4, 14))
    cache = CompressiveTransformerCache()
    first = generate(model, ids, attention_mask=mask, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == first.shape[1] - 1  # the last id was not read yet
    more = torch.cat([first, random_tokens(4, 7, seed=5) % START], dim=1)
    wide = torch.cat([mask, torch.ones(4, more.shape[1] - mask.shape[1], dtype=mask.dtype)], dim=1)
    expected = generate(model, more, attention_mask=wide, **way)
    given = more[:, cache.get_seq_length() :] if only_new else more
    second = generate(model, given, attention_mask=wide, **{CACHE_NAME: cache}, **way)
    assert second[:, given.shape[1] :].tolist() == expected[:, more.shape[1] :].tolist()


def test_all_ids_that_were_read_already_are_an_error() -> None:
    model, ids = wrapped(), texts(1, 20)
    cache = model(ids)[CACHE_NAME]
    with pytest.raises(CompressiveError, match="5 columns, but the cache has already read 20: pass all ids"):
        generate(model, ids[:, :5], **{CACHE_NAME: cache})


def test_a_cache_with_selected_lanes_equals_reading_those_rows() -> None:
    model, rows = wrapped(), texts(4, 14)
    ids, mask = padded(rows)
    following = random_tokens(6, 9, seed=4)

    def after(order: list[int], cache: CompressiveTransformerCache) -> None:
        read = model(ids[order], attention_mask=mask[order])[CACHE_NAME]
        assert cache.get_seq_length() == ids.shape[1]
        tokens = following[: len(order)]
        assert_close(model(tokens, **{CACHE_NAME: cache}).logits, model(tokens, **{CACHE_NAME: read}).logits)

    read = model(ids, attention_mask=mask)[CACHE_NAME]
    reordered, repeated, selected = copy.copy(read), copy.copy(read), copy.copy(read)
    reordered.reorder_cache(torch.tensor([2, 2, 0, 3]))
    repeated.batch_select_indices(torch.tensor([1, 0]))
    repeated.batch_repeat_interleave(3)
    selected.batch_select_indices(torch.tensor([3]))
    after([2, 2, 0, 3], reordered)
    after([1, 1, 1, 0, 0, 0], repeated)
    after([3], selected)
    after([0, 1, 2, 3], read)  # copies are independent
    read.reset()
    assert torch.equal(model(ids, **{CACHE_NAME: read}).logits, model(ids).logits)
    with pytest.raises(CompressiveError, match="cannot be cropped to 3 columns"):
        read.crop(3)


@pytest.mark.parametrize("shard", ["1GB", "2KB"], ids=["one file", "shards"])
def test_a_saved_model_loads_unchanged(shard: str, tmp_path: Any) -> None:
    model, tokens = wrapped(compressed_length=(3, 2), norm="post", dropout=0.1), texts(2, 30)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    files = {path.name for path in tmp_path.iterdir()}
    assert ("model.safetensors.index.json" in files) == (shard == "2KB")
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is CompressiveTransformerConfig
    assert config.to_core() == model.model.config
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is CompressiveTransformerForCausalLM
    assert loaded.dtype == torch.float64
    assert not loaded.training
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert_close(loaded(tokens).logits, model(tokens).logits)  # sums over mapped files round in another order
    assert torch.equal(generate(loaded, tokens), generate(model, tokens))
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert memory_of(half(tokens)[CACHE_NAME]).layers[0].recent.dtype == torch.bfloat16


def test_a_model_from_a_config_is_initialized_as_the_packages_model() -> None:
    config = ModelConfig(vocab_size=11, d_model=8, n_layers=2, n_heads=2, compression="dilated", norm="post")
    torch.manual_seed(0)
    expected = CompressiveTransformer(config).state_dict()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CompressiveTransformerConfig.from_core(config))
    for name, value in expected.items():
        assert torch.equal(model.model.state_dict()[name], value)


def test_weights_of_another_model_and_pickled_ones_are_refused(tmp_path: Any) -> None:
    wrapped(n_layers=1).save_pretrained(tmp_path)
    config = CompressiveTransformerConfig.from_core(wrapped(n_layers=2).model.config)
    with pytest.raises(CompressiveError, match=r"parameter 'model.blocks.1\S+' is missing"):
        CompressiveTransformerForCausalLM.from_pretrained(tmp_path, config=config)
    with pytest.raises(CompressiveError, match="pickled weights are never loaded"):
        CompressiveTransformerForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


def test_fields_of_the_config_are_checked_and_have_names_of_transformers() -> None:
    config = CompressiveTransformerConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=3)
    assert (config.d_model, config.n_heads, config.n_layers, config.hidden_size) == (16, 4, 3, 16)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 256, 256)
    with pytest.raises(CompressiveError, match="n_heads"):
        CompressiveTransformerConfig(d_model=16, n_heads=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 4, 8)}, "`inputs_embeds` is not supported"),
        ({"output_hidden_states": True}, "`output_hidden_states` is not supported"),
        (
            {"position_ids": torch.zeros(1, 4)},
            "the model takes `input_ids`, computes positions itself",
        ),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask must be \[batch = 1, columns >= 4\]"),
        ({"labels": torch.zeros(1, 4, dtype=torch.int64), "logits_to_keep": 1}, r"logits_to_keep \(1\) must be 0"),
        ({"past_key_values": (1,)}, "must be a CompressiveTransformerCache, got tuple"),
        ({"past_key_values": (), "cache": []}, "two names of the same argument: pass one of them"),
    ],
)
def test_unsupported_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressiveError, match=message):
        wrapped()(texts(1, 4), **arguments)


def test_resizing_the_vocabulary_and_assisted_decoding_are_refused() -> None:
    model = wrapped()
    assert model.resize_token_embeddings(11) is model.get_input_embeddings()
    with pytest.raises(CompressiveError, match="cannot be resized to 12 ids: the last of its 11"):
        model.resize_token_embeddings(12)
    with pytest.raises(ValueError, match="stateful"):
        generate(model, texts(1, 4), prompt_lookup_num_tokens=2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_lora_on_the_projections_trains_and_merges() -> None:
    model, tokens = wrapped(), texts(2, 30)
    before = model(tokens).logits.detach()
    adapted = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["query", "key_value", "output", "position"])
    )
    assert_close(adapted(input_ids=tokens).logits, before)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    adapted.eval()
    expected = adapted(input_ids=tokens).logits
    with pytest.raises(CompressiveError, match="merge adapters first"):
        CachedDecoder(model.model, model.model.empty_memory(1))
    text = generate(adapted, tokens)
    merged = adapted.merge_and_unload()
    assert not torch.equal(expected, before)
    assert_close(merged(tokens).logits, expected)
    assert torch.equal(generate(merged, tokens), text)


@pytest.mark.usefixtures("cpu")
def test_trainer_trains_and_evaluates(tmp_path: Any) -> None:
    model = wrapped().float()
    rows = [{"input_ids": row, "labels": row} for row in texts(6, 20)]
    options = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=0.02,
        report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    tokens = torch.stack([row["input_ids"] for row in rows])
    assert trainer.evaluate()["eval_loss"] < before
    with torch.no_grad():
        expected = float(model.eval()(tokens, labels=tokens).loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
