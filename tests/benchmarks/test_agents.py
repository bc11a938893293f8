"""The benchmark of agents counts attacks that fail, rows that are exact, and bugs whose tests pass, and
only those."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from weft.dataflow.errors import NoSandboxError
from weft.workers.sandbox import working_engine


def test_an_attack_that_succeeds_does_not_count(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
):
    try:
        working_engine()
    except NoSandboxError as error:
        pytest.skip(str(error))
    contained = load("agents/contained")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "workers"))
    import attacks  # pyright: ignore[reportMissingImports]

    def succeeds(engine: str) -> None:
        raise AssertionError("it left the sandbox")

    chosen = {name: attacks.ATTACKS[name] for name in ("/proc", "devices")} | {"escape": succeeds}
    monkeypatch.setattr(attacks, "ATTACKS", chosen)
    figures = contained.measure(repeats=1)
    assert figures["contained"] == 2
    assert figures["sandbox_start_ms"] > 0 < figures["sandbox_run_ms"]
    sys.modules.pop("contained")


def published_step(killed_agents: ModuleType) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a step, and what their attempts have seen. Each turn has two tokens, and each
    result is a token as well."""
    rows: list[dict[str, Any]] = []
    seen: list[dict[str, Any]] = []
    for episode in range(killed_agents.PROMPTS * killed_agents.EPISODES):
        group, turns = episode % killed_agents.PROMPTS, killed_agents.TURNS
        logprobs = [[-1.0 - episode, -0.5 - turn] for turn in range(turns)]
        columns = {"response_ids": [], "response_logprobs": [], "response_mask": []}
        for turn in range(turns):
            given = [] if turn == 0 else [100 + turn]
            columns["response_ids"] += [*given, 1, 2]
            columns["response_logprobs"] += [*(0.0 for _ in given), *logprobs[turn]]
            columns["response_mask"] += [*(0 for _ in given), 1, 1]
        mask = columns["response_mask"]
        row = {"sample_id": episode, "episode_id": 90 + episode, "group_id": group, "step": 1}
        row |= {"prompt": f"<user>Question {group}?", "reward": 0.5, "episode_rows": 1}
        row |= {"turn_ends": [2 + 3 * turn for turn in range(turns)], "episode_tokens": sum(mask)}
        rows.append({**row, **columns, "response_versions": [0] * len(mask)})
        results = [str(100 + turn) for turn in range(1, turns)]
        question = f"Question {group}?"
        seen.append({"question": question, "logprobs": logprobs, "results": results, "reward": 0.5})
    return rows, seen


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: None, ""),
        (lambda rows: rows.pop(), "episodes per prompt"),
        (lambda rows: rows.append(rows[0]), "more than once"),
        (lambda rows: rows[0].update(episode_id=rows[1]["episode_id"]), "more than once"),
        (lambda rows: rows[0].update(step=2), "steps [2] have no rows, or do not exist"),
        (lambda rows: rows[0].update(group_id=rows[1]["group_id"]), "has the prompts"),
        (lambda rows: rows[0].update(reward=0.25), "no attempt has seen it with its reward"),
        (lambda rows: rows[0]["response_logprobs"].__setitem__(0, -9.0), "no attempt has seen"),
        (lambda rows: rows[0]["response_mask"].__setitem__(0, 0), "trained tokens, not"),
        (lambda rows: rows[0]["response_mask"].__setitem__(2, 1), "do not match its turns"),
        (lambda rows: rows[0]["response_ids"].__setitem__(2, 7), "are not the results"),
        (lambda rows: rows[0]["response_versions"].__setitem__(0, 1), "versions of a turn decrease"),
        (lambda rows: rows[0]["turn_ends"].pop(), "its turns end at"),
        (lambda rows: rows[0]["response_versions"].pop(), "columns have different lengths"),
    ],
)
def test_a_lost_repeated_or_changed_episode_is_a_fault(
    load: Callable[[str], ModuleType], change: Callable[[list[dict[str, Any]]], object], said: str
):
    published, killed_agents = load("agents/faults"), load("agents/killed_agents")
    rows, seen = published_step(killed_agents)
    change(rows)
    found = published.faults_of_rows(rows, seen, 1, 0, lambda ids: " ".join(map(str, ids)))
    assert (said in "\n".join(found)) if said else not found


@pytest.mark.slow
@pytest.mark.ray
def test_kills_of_all_kinds_in_one_run_lose_and_repeat_no_episode(load: Callable[[str], ModuleType]):
    kills = load("agents/kills")
    assert kills.measure(seed=1, runs=1)["kills"] == len(kills.KINDS)


def test_two_parts_of_environments_halve_the_time_of_an_episode(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    assert load("agents/embodied").measure() == {"embodied": [320.0, 161.0]}


def turn(exact: ModuleType, prompt: list[int], ids: list[int]) -> Any:
    arrays = np.array(prompt, "<i4"), np.array(ids, "<i4"), -np.array(ids, np.float32)
    versions = np.array(ids, np.int32)
    return exact.Sampled(*(each.tobytes() for each in (*arrays, versions)), "stop")


def row(exact: ModuleType, prompt: list[int], response: list[int], mask: list[int], **more: Any) -> Any:
    """A row whose sampled tokens are above 2, with the log-probabilities and versions of `turn`."""
    ids = [np.array(each, "<i4").tobytes() for each in (prompt, response)]
    logprobs = [-each if each > 2 else 0 for each in response]
    after = [next(k for k in response[at:] if k > 2) for at in range(len(response))]
    arrays = np.array(mask, np.uint8), np.array(logprobs, np.float32), np.array(after, np.int32)
    made = exact.Row(*ids, *arrays, [2, 4], "stop")
    return dataclasses.replace(made, **more)


def test_rows_that_differ_from_the_engines_log_are_not_exact(load: Callable[[str], ModuleType]):
    exact = load("agents/exact")
    start = [1, 2]
    first, second, branch = (
        turn(exact, start, [3, 4]),
        turn(exact, [*start, 3, 4, 1], [5]),
        turn(exact, [*start, 3, 4, 2], [6]),
    )
    turns = [first, second, branch]
    main = row(exact, start, [3, 4, 1, 5], [1, 1, 0, 1])
    other = row(exact, start, [3, 4, 2, 6], [0, 0, 0, 1], turn_ends=[4])

    def found(*rows: Any) -> list[str]:
        return [*exact.problems(rows, turns)]

    assert found(main, other) == []
    wrong = {
        "a row is missing": [main],
        "a turn is trained twice": [main, dataclasses.replace(other, mask=main.mask, turn_ends=[2, 4])],
        "a given token is trained": [dataclasses.replace(main, mask=np.ones(4, np.uint8)), other],
        "a token is another one": [row(exact, start, [3, 7, 1, 5], [1, 1, 0, 1]), other],
        "a given token is another one": [row(exact, start, [3, 4, 2, 5], [1, 1, 0, 1]), other],
        "the prompt is longer": [row(exact, [1, 2, 3, 4, 1], [5], [1], turn_ends=[1]), other],
        "a row ends early": [row(exact, start, [3, 4], [1, 1], turn_ends=[2]), main, other],
        "an end is missing": [dataclasses.replace(main, turn_ends=[4]), other],
        "versions are moved": [dataclasses.replace(main, versions=np.roll(main.versions, 1)), other],
        "it ends in another way": [dataclasses.replace(main, finish_reason="length"), other],
    }
    assert {what: bool(found(*rows)) for what, rows in wrong.items()} == dict.fromkeys(wrong, True)


@pytest.mark.thorough
def test_a_pitfall_counts_if_all_of_its_tests_pass(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    pitfalls, file = load("agents/pitfalls"), tmp_path / "test_some.py"
    body = {1: "pass", 2: "pass", 3: "pytest.skip()", 4: "assert False"}
    tests = [
        f"@pytest.mark.pitfall({number})\ndef test_{number}(): {text}" for number, text in body.items()
    ]
    file.write_text(
        "\n".join(["import pytest", *tests, tests[3].replace("(4)", "(2)").replace("_4", "_5")])
    )
    monkeypatch.setattr(pitfalls, "TESTS", (str(file),))
    assert pitfalls.measure() == {"pitfalls": 1}


@pytest.mark.thorough
def test_random_conversations_are_exact(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
):
    exact = load("agents/exact")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "workers"))
    chosen = {name: exact.FAMILIES[name] for name in ("qwen3", "gpt_oss")}  # they strip thinking
    monkeypatch.setattr(exact, "FAMILIES", chosen)
    found = exact.measure(conversations=20, gap_conversations=2)
    assert found["exact"] == 1 and found["retokenised"] == 0 and found["max_logprob_gap"] <= 5e-4
