"""A folder of `compressive export` loads in transformers without this package, and is the same model."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

from compressive_transformer import COMPRESSIONS, Compression, Stream, cli, load, save, with_lengths
from compressive_transformer.data.tokenizers import ByteTokenizer, MuLawTokenizer, Tokenizer, WordTokenizer, train_bpe
from compressive_transformer.errors import CompressiveError
from compressive_transformer.hf import CompressiveTransformerForCausalLM, export_transformers
from compressive_transformer.hf.card import card
from compressive_transformer.hf.code import modeling_files
from compressive_transformer.hf.tokens import START, to_transformers
from runs import tiny_model

SAMPLE = (files("compressive_transformer.apps.demo") / "sample/test/356.txt").read_text(encoding="utf-8")[3000:3400]

# A process without the package.
CLEAN = """
import json, sys
sys.modules["compressive_transformer"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
folder, again, text = sys.argv[1:]
for path in (folder, again):
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    ids = tokenizer(text, return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=6)
    print(json.dumps([ids["input_ids"].tolist(), model(**ids).logits[0, -1].tolist(), tokenizer.decode(written[0])]))
    if path == folder:
        model.save_pretrained(again)
        tokenizer.save_pretrained(again)
"""


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    export_transformers(finished, out)
    return out


def bpe() -> Tokenizer:
    return train_bpe([SAMPLE], vocab_size=300)


def test_an_export_loads_without_the_package_and_again_after_saving(
    finished: Path, exported: Path, tmp_path: Path
) -> None:
    model, tokenizer = load(finished)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-W", "error::UserWarning", "-c", CLEAN]
    command = [*python, str(exported), str(tmp_path / "again"), "A ship"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == second
    ids, logits, written = first
    assert ids == [[tokenizer.start, *tokenizer.encode("A ship").tolist()]]
    torch.testing.assert_close(torch.tensor(logits), model(torch.tensor(ids)).logits[0, -1].detach())
    stream = Stream(model, tokenizer)
    stream.read("A ship")
    assert written == START + "A ship" + stream.write(6, temperature=0)


def test_an_export_equals_the_run_and_has_weights_as_safetensors_only(finished: Path, exported: Path) -> None:
    model, _ = load(finished)
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    assert type(loaded) is CompressiveTransformerForCausalLM
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)
    assert loaded.generation_config.suppress_tokens == [256]
    code = {path.name for path in exported.glob("*.py")}
    assert code == set(modeling_files())
    assert not [name for name in code if name.startswith(("checkpoint", "data", "evaluate", "files", "train"))]
    others = {path.name for path in exported.iterdir()} - code
    assert others == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_an_export_loads_with_longer_memory_than_in_training(finished: Path, exported: Path) -> None:
    model, _ = load(finished)
    lengths: dict[str, Any] = {"memory_length": (2, 9), "compressed_length": 7}
    longer = AutoModelForCausalLM.from_pretrained(exported, **lengths)
    tokens = torch.randint(256, (1, 60), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(longer(tokens).logits, with_lengths(model, **lengths)(tokens).logits)


def test_a_pipeline_writes_text(finished: Path, exported: Path) -> None:
    writer = pipeline("text-generation", model=str(exported), device="cpu")
    stream = Stream(*load(finished))
    stream.read("A ship")
    (written,) = writer("A ship", max_new_tokens=6, do_sample=False, return_full_text=False)
    assert written["generated_text"] == stream.write(6, temperature=0)


def test_the_model_card_ignores_an_unfinished_last_line_of_the_log(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    config = load(finished)[0].config
    with (tmp_path / "run/log.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"step": 11, "lo')
    assert card(tmp_path / "run", "name", config, 1) == card(finished, "name", config, 1)


def test_the_model_card_has_config_settings_and_scores_of_the_run(finished: Path, exported: Path) -> None:
    written = (exported / "README.md").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in (finished / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    best = min(line["validation"]["bits_per_byte"] for line in lines if "validation" in line)
    last = [line for line in lines if "loss" in line][-1]
    assert written.startswith("---\nlibrary_name: transformers\n")
    assert f"10 steps, {last['tokens']:,} tokens" in written
    assert f"{best:.4f} bits per byte" in written
    for row in ("| segment_length | 8 |", "| compression | conv-overlap |", "| learning_rate | 0.01 |"):
        assert row in written


@pytest.mark.parametrize("make", [ByteTokenizer, bpe], ids=["bytes", "bpe"])
def test_tokenizers_give_the_same_ids_and_texts(make: Any, tmp_path: Path) -> None:
    ours = make()
    to_transformers(ours).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    hard = ["", " ", "\r\n\t x  ", "don't  stop .", f"{START} é \N{GRINNING FACE} \x00<|endoftext|>", SAMPLE]
    for text in hard:
        ids = ours.encode(text).tolist()
        assert theirs(text)["input_ids"] == [ours.start, *ids]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode([ours.start, *ids], skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.pad_token_id, len(theirs)) == (ours.start, ours.start, ours.vocab_size)
    batch = theirs(hard[1:4], padding=True, return_tensors="pt")
    alone = [theirs(text)["input_ids"] for text in hard[1:4]]
    assert [ids[real.bool()].tolist() for ids, real in zip(*batch.values(), strict=True)] == alone
    assert batch["attention_mask"][:, -1].tolist() == [1, 1, 1]  # padding is on the left


def test_a_streamer_gives_the_text_while_it_is_written(finished: Path, exported: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    given = {**tokenizer("A ship", return_tensors="pt"), "max_new_tokens": 12, "streamer": streamer}
    writer = Thread(target=model.generate, kwargs=given)
    writer.start()
    pieces = list(streamer)
    writer.join()
    stream = Stream(*load(finished))
    stream.read("A ship")
    assert "".join(pieces) == stream.write(12, temperature=0)


def test_push_to_hub_sends_weights_and_configs(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sent = AutoModelForCausalLM.from_pretrained(exported), {}

    def no_card(*_: Any, **__: Any) -> None:
        raise EntryNotFoundError("no README.md there yet")

    def commit(_: HfApi, repo_id: str, operations: list[Any], **__: Any) -> None:
        sent.update({operation.path_in_repo: (repo_id, operation.upload_info.size) for operation in operations})

    monkeypatch.setattr(ModelCard, "load", no_card)
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: SimpleNamespace(repo_id="someone/model"))
    monkeypatch.setattr(HfApi, "create_commit", commit)
    model.push_to_hub("someone/model")
    assert set(sent) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert sent["model.safetensors"] == ("someone/model", (exported / "model.safetensors").stat().st_size)


def test_the_command_writes_an_export(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["export", str(finished), str(tmp_path / "out"), "--format", "transformers"]
    monkeypatch.setattr(sys, "argv", ["compressive", *arguments])
    cli.main()
    assert (tmp_path / "out" / "config.json").is_file()
    with pytest.raises(SystemExit, match="out: exists already; choose another folder"):
        cli.main()


class Last(Compression):
    def forward(self, evicted: torch.Tensor) -> torch.Tensor:
        return evicted[:, :, -1]


def test_parts_that_transformers_could_not_load_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPRESSIONS, "last", Last)
    save(tmp_path / "run", tiny_model(compression="last"), ByteTokenizer())
    with pytest.raises(CompressiveError, match=r"compression \('last'\) is Last, a function from outside the package"):
        export_transformers(tmp_path / "run", tmp_path / "out")
    for tokenizer in (WordTokenizer(["<unk>", "<eos>"]), MuLawTokenizer(16_000)):
        with pytest.raises(CompressiveError, match="has no form in the library tokenizers"):
            to_transformers(tokenizer)
    taken = train_bpe(["a"], vocab_size=257)
    taken._tokenizer.add_tokens([START])
    with pytest.raises(CompressiveError, match=r"cannot give <\|start\|> the start id 257"):
        to_transformers(type(taken)(taken._tokenizer))
    assert not (tmp_path / "out").exists()


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "compressive_transformer.hf")
    with pytest.raises(CompressiveError, match=r"pip install 'compressive-transformer\[hf\]'"):
        importlib.import_module("compressive_transformer.hf")
