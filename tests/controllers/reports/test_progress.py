"""Progress reports: their times, and that a failing display never ends a run."""

import subprocess
import sys
from pathlib import Path

import pytest
from shown import run, stream, write_samples, written

from weft.controllers.reports.displays import PlainLines
from weft.controllers.reports.progress import Progress
from weft.controllers.reports.step_line import Step, ending_of, score_of
from weft.controllers.reports.terminal import Terminal


def test_each_step_has_a_line_and_the_end_summarizes_evaluations(tmp_path: Path):
    to = stream()
    run(PlainLines(to), tmp_path, 4)
    lines = written(to).splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == [f"step {k}/4" for k in range(1, 5)]
    assert lines[4].startswith("run run: 4 steps") and lines[-1].split() == ["run:", str(tmp_path)]
    assert [line.split()[0] for line in lines[5:7]] == ["best", "last"] and lines[5].endswith(
        "at step 4"
    )


def test_an_evaluation_is_shown_with_its_interval(tmp_path: Path):
    to = stream()
    progress = Progress(2, tmp_path, PlainLines(to))
    progress.evaluated(
        "eval",
        0,
        {"eval/reward/mean": 0.25, "eval/reward/std": 0.1875**0.5, "eval/reward/scored": 100.0},
    )
    progress.evaluated("pairs", 2, {"pairs/preference_accuracy": 0.75, "pairs/functions/margin": 3.0})
    assert written(to).splitlines() == [
        "eval before the first step: mean reward 0.250 (95 %: 0.175 to 0.343)",
        "pairs of step 2: preference accuracy 0.750",
    ]


def test_steps_that_come_too_fast_for_a_terminal_are_left_out_but_not_the_last(tmp_path: Path):
    to = stream()
    run(Terminal(to), tmp_path, 300)
    lines = [line for line in written(to).splitlines() if "/300" in line]
    assert len(lines) < 30 and lines[-1].split()[0] == "300/300"


def test_a_sample_follows_its_step_and_one_that_cannot_be_read_is_left_out(tmp_path: Path):
    file = write_samples(tmp_path / "s.arrow", response="four", reward=1.0)
    torn = tmp_path / "torn.arrow"
    torn.write_bytes(file.read_bytes()[:90])
    to = stream()
    progress = Progress(40, tmp_path, PlainLines(to), show_every=5)
    for step in range(1, 21):
        if step != 15:
            progress.recorded(
                step, [torn, file] if step == 10 else [torn]
            )  # of several ranks, the first with samples
        progress.stepped({"step": float(step)})
        if step == 15:
            progress.recorded(15, [file])
            progress.recorded(15, [file])  # a step may be recorded in several parts
    lines = written(to).splitlines()
    assert [k for k, line in enumerate(lines) if line.startswith("sample of")] == [10, 17]
    assert lines[9].startswith("step 10/") and lines[10] == "sample of step 10: reward 1"


def test_a_display_without_a_reader_does_not_end_the_run(tmp_path: Path):
    program = (
        "from weft.controllers.reports.progress import display_for\n"
        "from weft.controllers.reports.progress import Progress\n"
        f"progress = Progress(5000, __import__('pathlib').Path({str(tmp_path)!r}), display_for('plain'))\n"
        "[progress.stepped({'step': float(step)}) for step in range(5001)]\n"
        "print('the script goes on')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (0, b"")
    process.stderr.close()


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({"actor/loss": 0.5, "tokens_per_s": 9.0}, ["loss", "tokens/s"]),
        ({"actor/loss": 0.5, "actor/preference_accuracy": 0.5}, ["loss", "preference accuracy"]),
        ({"reward/mean": 0.5, "actor/loss": 0.1, "rollout/truncation_rate": float("nan")}, ["reward"]),
        ({"eval/reward/mean": 0.5}, []),
    ],
)
def test_unmeasured_metrics_are_not_shown(row: dict[str, float], labels: list[str]):
    assert list(Step(1, 9, row).numbers) == labels


def test_a_score_shows_its_meaning_and_number_of_prompts():
    rows = {"eval/avg@1": 0.6, "eval/avg@1_low": 0.5, "eval/avg@1_high": 0.7, "eval/prompts_lost": 0.0}
    assert str(score_of("eval", 1, rows).text) == "mean reward 0.600 (95 %: 0.500 to 0.700)"  # pyright: ignore[reportOptionalMemberAccess]
    rows |= {"eval/pass@1": 0.5, "eval/prompts_lost": 8.0, "eval/prompts_asked": 16.0}
    score = score_of("eval", 1, rows)
    assert score is not None and score.value == 0.5
    assert (
        score.text
        == "pass@1 0.500, mean reward 0.600; 8 of 16 prompts: the others have no scored response"
    )
    nothing = score_of("eval", 1, {"eval/prompts_lost": 16.0, "eval/prompts_asked": 16.0})
    assert (
        nothing is not None
        and nothing.text == "nan; 0 of 16 prompts: the others have no scored response"
    )


def test_the_best_score_is_one_of_all_prompts():
    known = {"step": 1.0, "eval/pass@1": 0.5, "eval/prompts_lost": 0.0, "eval/prompts_asked": 16.0}
    half = {"step": 2.0, "eval/pass@1": 1.0, "eval/prompts_lost": 8.0, "eval/prompts_asked": 16.0}
    assert [score.step for score in ending_of("run", [known, half], ["eval"], 5.0, {}).best] == [1]


def test_the_best_evaluation_is_the_one_of_the_largest_reward_and_of_a_loss_none_is():
    rows = [
        {"step": float(k), "a/reward/mean": value, "b/actor/loss": value}
        for k, value in enumerate([0.1, 0.7, float("nan"), 0.3])
    ]
    ending = ending_of("run", rows, ["a", "b", "never"], 5.0, {})
    assert [(score.evaluation, score.step, score.value) for score in ending.best] == [("a", 1, 0.7)]
    assert [(score.evaluation, score.step) for score in ending.last] == [("a", 3), ("b", 3)]
    assert score_of("a", 3, {}) is None
