"""Progress: a bar on a terminal, lines elsewhere, all of it on stderr."""

from __future__ import annotations

import time

import pytest

from compressive_transformer.progress import Progress


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_lines_count_units_and_estimate_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    said: list[str] = []
    with Progress(3_000, unit="bytes", completed=1_000, seconds=5.0, report=said.append) as progress:
        for clock.now, done in ((104.0, 1_500), (105.0, 2_000), (106.0, 2_100)):
            progress.update(done, "train: 2 documents")
        assert said == ["2,000 of 3,000 bytes, ETA 0:00:05; train: 2 documents"]
        clock.now = 109.0
        progress.print("a validation")
        clock.now = 111.0
        progress.advance(400)  # the next line waits five seconds after the last one, of whatever kind
        assert said[1:] == ["a validation"]
        clock.now = 115.0
        progress.update(2_500, total=4_000)
        assert said[2:] == ["2,500 of 4,000 bytes, ETA 0:00:15"]


def test_without_a_total_speed_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    said: list[str] = []
    with Progress(unit="documents", report=said.append, seconds=0) as progress:
        clock.now = 200.0
        progress.restart(50)
        clock.now = 210.0
        progress.advance(30)
    assert said == ["80 documents, 3 a second"]


def test_nothing_done_has_no_estimate() -> None:
    assert str(Progress(10, unit="steps", completed=2, report=False)) == "2 of 10 steps, ETA unknown"


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE" if terminal else "UNSET", "1")
    monkeypatch.setenv("COLUMNS", "90")
    with Progress(10, seconds=0) as progress:
        assert progress.has_bar == terminal
        progress.update(5, "[red]as it is[/red]")
        progress.print("a line [that] stays")
    said = capsys.readouterr()
    assert said.out == ""
    assert "5 of 10 tokens, ETA 0:00:00; [red]as it is[/red]" in said.err
    assert "a line [that] stays\n" in said.err
    assert ("\x1b" in said.err) == terminal


def test_false_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, seconds=0, report=False) as progress:
        progress.advance()
        progress.print("a line")
    assert capsys.readouterr() == ("", "")
