"""The model in lm-evaluation-harness, whose package is not among the needs of these tests: it is heavy.

`pip install 'compressive-transformer[eval]'` makes them run.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from compressive_transformer import Corpus, Stream, evaluate, load  # noqa: E402
from compressive_transformer.errors import CompressiveError  # noqa: E402
from compressive_transformer.lm_eval import TASKS, CompressiveLM  # noqa: E402
from runs import write_books  # noqa: E402

pytestmark = [pytest.mark.usefixtures("cpu"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_the_task_pg19_equals_evaluate(finished: Path, corpus: Corpus, tmp_path: Path) -> None:
    books = write_books(tmp_path / "books")
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"folder": str(books)})
    results = lm_eval.simple_evaluate(
        model="compressive", model_args={"run": str(finished)}, batch_size=2, device="cpu", tasks=["pg19"],
        task_manager=manager, bootstrap_iters=0, log_samples=False,
    )["results"]["pg19"]  # fmt: skip
    expected = evaluate(load(finished)[0], corpus.test).total
    assert results["bits_per_byte,none"] == pytest.approx(expected.bits_per_byte, abs=1e-6)
    logarithm = math.log(results["word_perplexity,none"])
    assert logarithm == pytest.approx(expected.nats / expected.words, abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_continuation_is_scored_after_its_context_in_any_batch(batch_size: int, finished: Path) -> None:
    model, tokenizer = load(finished)
    language_model = CompressiveLM(str(finished), batch_size=batch_size, device="cpu")
    pairs = [("", "A ship"), ("The sea was calm and ", "blue"), ("It was a long way to the shore. ", "e" * 20)]
    for pair, (likelihood, likeliest) in zip(
        pairs, language_model.loglikelihood([asked(*p) for p in pairs]), strict=True
    ):
        whole = tokenizer.encode("".join(pair)).tolist()
        count = len(whole) - len(tokenizer.encode(pair[0].rstrip()))
        logits = model(torch.tensor([[tokenizer.start, *whole[:-1]]])).logits[0, -count:].log_softmax(-1).detach()
        wanted = torch.tensor(whole[-count:])
        assert likelihood == pytest.approx(float(logits.gather(1, wanted[:, None]).sum()), abs=1e-4)
        assert likeliest == bool((logits.argmax(-1) == wanted).all())
    stream = Stream(model, tokenizer)
    stream.read("A ship")
    ((_, likeliest),) = language_model.loglikelihood([asked("A ship", stream.write(1, temperature=0))])
    assert likeliest


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_texts_of_any_length_are_scored_as_by_a_stream(batch_size: int, finished: Path) -> None:
    language_model, run = CompressiveLM(str(finished), batch_size=batch_size, device="cpu"), load(finished)
    texts = ["A ship", "The sea was calm and blue. " * 4, "e", "", "It was a long way to the shore."]
    scores = language_model.loglikelihood_rolling([asked(text) for text in texts])
    assert scores == pytest.approx([-float(Stream(*run).score(text).sum()) for text in texts], abs=1e-4)


def test_text_ends_before_the_first_stop_text(finished: Path) -> None:
    language_model, stream = CompressiveLM(str(finished), device="cpu"), Stream(*load(finished))
    stream.read("A ship")
    whole = stream.write(20, temperature=0)
    given = {"max_gen_toks": 20}
    assert language_model.generate_until([asked("A ship", given)]) == [whole]
    ends = [whole[7:9], whole[4:6]]
    (cut,) = language_model.generate_until([asked("A ship", {**given, "until": ends})])
    assert cut == whole[: min(whole.find(end) for end in ends)]
    with pytest.raises(CompressiveError, match="'beams' is not supported"):
        language_model.generate_until([asked("A ship", {"beams": 3})])


def test_other_models_stay_registered_and_missing_books_are_named(tmp_path: Path) -> None:
    assert get_model("dummy").__name__ == "DummyLM"
    assert get_model("compressive") is CompressiveLM
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    with pytest.raises(CompressiveError, match="needs the folder of the books"):
        manager.load(["pg19"])
