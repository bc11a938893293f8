"""Each display shows the complete run on any terminal, and escapes text of models."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
from shown import DISPLAYS, ROW, run, stream, write_samples, written

from weft.controllers.reports.displays import Display, JsonLines, PlainLines
from weft.controllers.reports.progress import Progress, display_for
from weft.controllers.reports.step_line import Ending, EvaluationScore, Step
from weft.controllers.reports.terminal import Terminal
from weft.dataflow.runs.alerts import read_alerts

HOSTILE = "\x1b[2J\x1b]0;owned\x07 [bold]b[/bold] [link=x] :smile: \u202egnp.exe\r\u2028\x9b31m 猫"

every_display = pytest.mark.parametrize("display", DISPLAYS)


@every_display
def test_a_run_is_shown_with_every_figure_a_sample_and_its_folder(display: str, tmp_path: Path):
    file = write_samples(
        tmp_path / "s.arrow",
        prompt="2+2=",
        response="5",
        finish_reason="length",
        reward=0.25,
        **{"reward/form": 1.0},
        reward_parts='{"right": 0.125}',
    )
    to = stream()
    run(DISPLAYS[display](to), tmp_path, 12, lambda progress, step: progress.recorded(step, [file]))
    said = written(to)
    shown = [
        "2+2=",
        "0.25",
        "form",
        "right",
        "0.125",
        str(tmp_path),
        "truncation_rate" if display == "json" else "truncated",
    ]
    assert [text for text in shown if text not in said] == []
    if display == "json":
        events = [
            json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in said.splitlines()
        ]
        assert [event["step"] for event in events if event["event"] == "step"] == [*range(1, 13)]
        assert [event["step"] for event in events if event["event"] == "sample"] == [10]
        assert events[-1]["best"][0]["step"] == events[-1]["last"][0]["step"] == 12
    else:
        figures = [
            "reward",
            "0.500 ±0.250",
            "no signal",
            "75%",
            "50%",
            "entropy",
            "1.50",
            "gap",
            "2e-03",
            "1,234",
        ]
        assert [text for text in figures if text not in said] == []
        assert said.count("of step 10") == 1 and "best evaluation" in said and "1.200 (95 %: " in said


@every_display
def test_text_of_a_model_steers_nothing(display: str, tmp_path: Path):
    file = write_samples(
        tmp_path / "s.arrow", prompt=HOSTILE, response=HOSTILE * 100_000, answer="\n" * 5000, reward=0.0
    )
    to = stream()

    def tell(progress: Progress, step: int) -> None:
        progress.recorded(step, [file])
        progress.alert("mistake", HOSTILE)

    run(DISPLAYS[display](to), tmp_path, 10, tell)
    said = written(to)
    assert not {*"\x1b\x07\r\x9b\u202e\u2028"} & {*said}
    assert "[bold]b[/bold]" in said and ":smile:" in said, "it is no markup"
    assert len(said) < 40_000 and said.count("\n") < 150, "long texts are cut"


@every_display
def test_a_stream_that_cannot_write_a_character_gets_an_escape(display: str, tmp_path: Path):
    file = write_samples(tmp_path / "s.arrow", response="猫", reward=1.0)
    to = stream("ascii")
    run(DISPLAYS[display](to), tmp_path, 10, lambda progress, step: progress.recorded(step, [file]))
    assert "\\u732b" in written(to)


def test_a_narrow_terminal_shows_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wide, narrow = stream(), stream()
    Terminal(wide).step(Step(1, 9, ROW, 5.0))
    monkeypatch.setenv("COLUMNS", "40")
    Terminal(narrow).step(Step(1, 9, ROW, 5.0))
    assert max(map(len, written(narrow).splitlines())) <= 40 and len(written(wide).splitlines()) == 2
    words = {word for word in written(wide).split() if not word[0].isdigit()}
    assert words <= {*written(narrow).split()}


def test_columns_keep_their_places_and_their_names_come_back(tmp_path: Path):
    to = stream()
    terminal = Terminal(to)
    for step in range(1, 45):
        terminal.step(Step(step, 44, ROW, 5.0))
    lines = written(to).splitlines()
    assert len({*map(len, lines)}) == 1 and sum("tokens/s" in line for line in lines) == 3


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured, plain = stream(), stream()
    Terminal(coloured).say("low on disk", warning=True)
    monkeypatch.setenv("NO_COLOR", "1")
    Terminal(plain).say("low on disk", warning=True)
    assert "\x1b[33m" in written(coloured) and "\x1b[33m" not in written(plain)


def test_the_form_follows_from_the_terminal(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(display_for("auto"), PlainLines) and isinstance(display_for("json"), JsonLines)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(display_for(True), Terminal) and isinstance(display_for("plain"), PlainLines)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display_for("auto"), PlainLines)


def test_names_do_not_steer_a_terminal_and_json_has_finite_numbers():
    score = EvaluationScore("eval\x1b[2J", 1, 0.5, (math.nan, 1.0))
    for display in (Terminal, PlainLines, JsonLines):
        stream = io.StringIO()
        display(stream).evaluated(score)
        display(stream).ended(
            Ending("run\x1b[2J", 1, 1.0, (), (score,), {"samples\x1b[2J": Path("a\x1b[2J")})
        )
        assert "\x1b[2J" not in stream.getvalue() and (
            display is not JsonLines or "NaN" not in stream.getvalue()
        )


def test_a_closed_stream_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    standard = io.StringIO()
    monkeypatch.setattr(sys, "stdout", standard)
    progress = Progress(3, tmp_path, display_for("plain"))
    progress.say("before")
    assert standard.getvalue() == "before\n"
    standard.close()
    progress.say("after")
    progress.alert("mistake", "after")
    assert type(display_for("rich")) is Display
    assert [alert.text for alert in read_alerts(tmp_path)] == ["after"]
