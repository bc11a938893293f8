"""Tasks of reasoning-gym: rows that a program makes, and checks, in any number."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from ..errors import UserError, nearest

TAGGED = "Give the final answer between <answer> and </answer>."


def task_rows(
    task: str, size: int, seed: int, level: int | None, difficulty: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return rows of a task, all different: `prompt`, `answer`, and the columns that the grader
    needs to make the same task again, `task`, `task_settings` (JSON) and `task_number`.

    Args:
        level: level of the task's curriculum in all of its attributes, from 0; None for the
            defaults.
        difficulty: settings of the task, which replace the settings of the level.
    """
    settings = {**_level_settings(task, level), **difficulty, "seed": seed, "size": size}
    try:
        text = json.dumps(settings, sort_keys=True)
    except TypeError as error:
        raise UserError(
            f"reasoning_gym({task!r}): its settings must be values of JSON: {error}"
        ) from error
    made = task_set(task, text)
    rows: dict[str, dict[str, Any]] = {}
    for number in range(size):
        entry = made[number]
        prompt = f"{entry['question']}\n{TAGGED}"
        row = {"prompt": prompt, "answer": str(entry["answer"]), "task": task}
        rows.setdefault(prompt, {**row, "task_settings": text, "task_number": number})
    return list(rows.values())


@functools.lru_cache(maxsize=64)
def task_set(task: str, settings: str) -> Any:
    """Return reasoning-gym's data set of a task. Raises a UserError for an unknown task or setting."""
    factory = _factory(task)
    try:
        return factory.create_dataset(task, **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"reasoning_gym({task!r}): reasoning-gym refuses its settings: {error}"
        ) from error


def _factory(task: str) -> Any:
    try:
        import reasoning_gym.factory as factory  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"reasoning_gym({task!r}) needs the library reasoning-gym ({error}): pip install 'weft[reasoning-gym]'"
        ) from error
    if task not in factory.DATASETS:
        hint = nearest(task, factory.DATASETS) or f"; there are {len(factory.DATASETS)} tasks"
        raise UserError(f"reasoning_gym({task!r}): there is no such task{hint}")
    return factory


def _level_settings(task: str, level: int | None) -> dict[str, Any]:
    if level is None:
        return {}
    factory = _factory(task)
    if not factory.has_curriculum(task):
        raise UserError(f"reasoning_gym({task!r}, level={level}): the task has no levels; leave it out")
    if level < 0:
        raise UserError(f"reasoning_gym({task!r}, level={level}): level must be at least 0")
    curriculum = factory.create_curriculum(task)
    curriculum.set_global_level(level)
    chosen = vars(curriculum.generate_configuration())
    return {name: value for name, value in chosen.items() if name not in ("seed", "size")}
