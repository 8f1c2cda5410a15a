"""Plan of an experiment: settings times seeds, built and checked before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ...config import ModelConfig, PerLayer, TrainConfig, check_range, check_types
from ...config.toml import from_mapping, read_toml, to_dict
from ...data import Corpus
from ...errors import CompressiveError
from ...evaluate.recall import answers_of
from ...model import CompressiveTransformer, with_lengths

TABLES = ("model", "train", "evaluate")
FIELDS = ("seeds", "baseline", *TABLES, "settings")


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of scoring a trained model.

    Raises CompressiveError that names the field, its value and the valid range.
    """

    task: Literal["text", "recall"] = "text"
    """Measure: "text" is `evaluate` on the documents of the split, "recall" the share of right answers of
    `recall_accuracy`."""
    split: Literal["train", "validation", "test"] = "validation"
    """The split of the corpus that is scored."""
    tokens: int = 0
    """Score about this many tokens only, in beginnings of documents; 0 for all."""
    batch_size: int = 8
    """Documents that are read side by side; no score depends on it."""
    memory_length: PerLayer | None = None
    """Slots of recent memory, if other than in training; a setting may have its own."""
    compressed_length: PerLayer | None = None
    """Slots of compressed memory, if other than in training; a setting may have its own."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, ("tokens",), low=0)
        check_range(self, ("batch_size",), low=1)

    @property
    def lengths(self) -> dict[str, PerLayer]:
        """Arguments of `with_lengths`."""
        given = {"memory_length": self.memory_length, "compressed_length": self.compressed_length}
        return {name: length for name, length in given.items() if length is not None}


@dataclass(frozen=True)
class Setting:
    """One row of the table: a model, trained and scored with each of the seeds."""

    name: str
    model: ModelConfig
    train: TrainConfig
    """Its seed is replaced by those of the plan."""
    evaluate: EvaluateConfig
    parameters: int
    """Number of parameters."""

    @property
    def evaluated(self) -> ModelConfig:
        """The model with the lengths of memory that it is scored with."""
        return replace(self.model, **self.evaluate.lengths)  # type: ignore[arg-type]

    @property
    def folder(self) -> str:
        """Name as part of a path: characters other than letters, digits, dot and dash become a dash."""
        return re.sub(r"[^\w.]+", "-", self.name).strip("-.")


@dataclass(frozen=True)
class Run:
    """One setting with one seed."""

    setting: Setting
    seed: int

    @property
    def train(self) -> TrainConfig:
        """Training options of the setting, with this seed."""
        return replace(self.setting.train, seed=self.seed)

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.setting.name}, seed {self.seed}"

    @property
    def path(self) -> Path:
        """Folder of the run within that of the experiment."""
        return Path("runs", self.setting.folder, f"seed-{self.seed}")

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return all configs as plain values."""
        return {
            "model": to_dict(self.setting.model),
            "train": to_dict(self.train),
            "evaluate": to_dict(self.setting.evaluate),
        }


@dataclass(frozen=True)
class Plan:
    """Settings times seeds, and the setting that all others are compared with."""

    file: str | None
    """Path of the file; None for a mapping."""
    tables: Mapping[str, Any]
    """Content of the file."""
    seeds: tuple[int, ...]
    baseline: str
    settings: tuple[Setting, ...]

    def runs(self) -> Iterator[Run]:
        """Yield all runs, seed by seed, so that the table is soon complete for some seeds."""
        for seed in self.seeds:
            for setting in self.settings:
                yield Run(setting, seed)


def read_plan(source: str | Path | Mapping[str, Any], corpus: Corpus) -> Plan:
    """Read a plan from a TOML file, or from a mapping of the same form, for a corpus.

    The configs of every setting are checked, and its model is built on the meta device.
    Raises CompressiveError for the first mistake.
    """
    where = "the plan" if isinstance(source, Mapping) else str(source)
    tables = source if isinstance(source, Mapping) else read_toml(Path(source))
    for name in tables:
        if name not in FIELDS:
            raise CompressiveError(f"{where}: unknown table or field {name!r}; expected {', '.join(FIELDS)}")
    for name in TABLES:
        _table(tables.get(name, {}), f"{where}, {name}")
    named = _table(tables.get("settings", {}), f"{where}, settings")
    if not named:
        raise CompressiveError(f"{where}: no settings; give at least one table [settings.NAME]")
    settings = tuple(_setting(name, changes, tables, corpus, where) for name, changes in named.items())
    seeds = _seeds(tables.get("seeds"), where)
    baseline = tables.get("baseline")
    if not isinstance(baseline, str) or baseline not in named:
        raise CompressiveError(f"{where}: baseline ({baseline!r}) must be one of the settings: {', '.join(named)}")
    _check_different(settings, where)
    if (scored := settings[0].evaluate).task == "recall":
        answers_of(corpus.split(scored.split))
    return Plan(None if isinstance(source, Mapping) else where, tables, seeds, baseline, settings)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CompressiveError(f"{where}: expected a table, got {value!r}")
    return value


def _seeds(seeds: Any, where: str) -> tuple[int, ...]:
    if not isinstance(seeds, Sequence) or isinstance(seeds, str) or not seeds:
        raise CompressiveError(f"{where}: seeds ({seeds!r}) must be a list of at least one number, as in [0, 1, 2]")
    for seed in seeds:
        from_mapping(TrainConfig, {"seed": seed}, f"{where}, seeds")
    if len(set(seeds)) < len(seeds):
        raise CompressiveError(f"{where}: seeds ({list(seeds)}) must differ from one another")
    return tuple(seeds)


def _setting(name: str, changes: Any, base: Mapping[str, Any], corpus: Corpus, where: str) -> Setting:
    where = f"{where}, setting {name!r}"
    for table, values in _table(changes, where).items():
        if table not in TABLES:
            raise CompressiveError(f"{where}: unknown table or field {table!r}; expected {', '.join(TABLES)}")
        _table(values, f"{where}, {table}")
    for field in changes.get("evaluate", {}):
        if field not in ("memory_length", "compressed_length"):
            raise CompressiveError(
                f"{where}: evaluate.{field} must be the same for all settings, else they cannot be compared; "
                "set it in [evaluate]"
            )
    merged = {table: {**base.get(table, {}), **changes.get(table, {})} for table in TABLES}
    if "seed" in merged["train"]:
        raise CompressiveError(f"{where}: train.seed is set by seeds = [...]; leave it out")
    merged["model"].setdefault("vocab_size", corpus.vocab_size)
    model = from_mapping(ModelConfig, merged["model"], f"{where}, model")
    train = from_mapping(TrainConfig, merged["train"], f"{where}, train")
    evaluate = from_mapping(EvaluateConfig, merged["evaluate"], f"{where}, evaluate")
    if model.vocab_size != corpus.vocab_size:
        raise CompressiveError(
            f"{where}: vocab_size ({model.vocab_size}) must be {corpus.vocab_size}, "
            f"the number of ids of {corpus.path}; leave it out"
        )
    for split in ("train", evaluate.split, *(["validation"] if train.validate_every else [])):
        corpus.split(split)
    return Setting(name, model, train, evaluate, _count_parameters(model, evaluate, where))


def _count_parameters(config: ModelConfig, evaluate: EvaluateConfig, where: str) -> int:
    """Count the parameters of a model on the meta device: without memory, it finds models that cannot be built."""
    try:
        with torch.device("meta"):
            model = CompressiveTransformer(config)
        with_lengths(model, **evaluate.lengths)
    except CompressiveError as error:
        raise CompressiveError(f"{where}: {error}") from None
    return sum(parameter.numel() for parameter in model.parameters())


def _check_different(settings: Sequence[Setting], where: str) -> None:
    for index, setting in enumerate(settings):
        if not setting.folder:
            raise CompressiveError(f"{where}: setting {setting.name!r} needs a name with letters or digits")
        for other in settings[:index]:
            pair = f"{where}: settings {other.name!r} and {setting.name!r}"
            if setting.folder.casefold() == other.folder.casefold():
                raise CompressiveError(f"{pair} would share the folder runs/{setting.folder}; rename one")
            if all(getattr(setting, table) == getattr(other, table) for table in TABLES):
                raise CompressiveError(f"{pair} are the same; change or remove one")
