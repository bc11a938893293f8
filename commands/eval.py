"""`weft eval`: measure a model on suites of held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from ..dataflow.errors import UserError
from ..dataflow.runs.files import is_run
from .command_line import RUNS, Answer, Json, Name


def evaluate(
    model: Annotated[
        Positional[str], arg(metavar="MODEL", help="Folder or Hugging Face id, or the name of a run.")
    ],
    *,
    suite: Annotated[
        UseAppendAction[tuple[str, ...]], arg(metavar="NAME=FILE", help_behavior_hint="(repeatable)")
    ],
    n: Annotated[int | None, arg(metavar="NUMBER", help_behavior_hint="")] = None,
    temperature: Annotated[float | None, arg(metavar="NUMBER", help_behavior_hint="")] = None,
    max_tokens: int = 1024,
    limit: Annotated[int | None, arg(metavar="ROWS", help_behavior_hint="")] = None,
    seed: int = 0,
    name: Name = None,
    root: Path = RUNS,
    json: Json = False,
) -> Answer:
    """Measure a model on held-out rows, with 95 % confidence intervals. It is a run without steps.

    Args:
        suite: A suite and the file with its rows: gsm8k, math, aime, ifeval, humaneval or mbpp.
        n: Responses per prompt. Default: 1; 16 for aime.
        temperature: Sampling temperature. Default: 0, the likeliest tokens; 0.6 for aime.
        max_tokens: Maximum length of a response.
        limit: Use only the first rows of each suite.
        seed: Seed of sampling.
        name: Name of the run. Default: the current time.
        root: Folder of the runs.
    """
    from ..controllers.reports.step_line import score_of
    from ..controllers.suites import evaluate_model

    if not suite:
        raise UserError("weft eval MODEL --suite NAME=FILE: give at least one --suite")
    files: dict[str, str] = {}
    for each in suite:
        suite_name, equals, file = each.partition("=")
        if not (suite_name and equals and file):
            raise UserError(f"--suite {each}: give NAME=FILE, such as --suite gsm8k=test.jsonl")
        if suite_name in files:
            raise UserError(f"--suite {suite_name} is given twice; give each suite one file")
        files[suite_name] = file
    found = evaluate_model(
        _model_of(model, root),
        files,
        n=n,
        temperature=temperature,
        max_tokens=max_tokens,
        limit=limit,
        name=name,
        root=root,
        seed=seed,
        progress="none" if json else "auto",
    )
    scores = {each: score_of(each, 0, found) for each in files}
    lines = [f"{each}: {score.text if score else 'no scores'}" for each, score in scores.items()]
    return Answer({"model": model, "metrics": found}, "\n".join(lines))


def _model_of(model: str, root: Path) -> str:
    """Return the path of a run's trained model if this is the directory or name of a run, or else the
    name itself. Raises a UserError if the run has no complete model."""
    run = next((path for path in (Path(model), root / model) if is_run(path)), None)
    if run is None:
        return model
    if not (run / "model" / "config.json").is_file():
        raise UserError(
            f"run {model!r} has no complete model in {run / 'model'}; write one with `weft export {model} FOLDER`, for an adapter with "
            "--merged"
        )
    return str(run / "model")
