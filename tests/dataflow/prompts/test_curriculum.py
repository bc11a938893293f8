"""A curriculum draws prompts by their outcomes. Its state survives kills, and does not depend on
the order of outcomes within a step."""

import datetime
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from weft.dataflow.errors import SettingError, UserError
from weft.dataflow.prompts.curriculum import Curriculum, Gate, Pool, learnability, unsolved
from weft.dataflow.prompts.prompt_queue import RECENT, PromptQueue, read_state, write_state
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.prompts.tokenizer import Tokenizer
from weft.dataflow.source import positions

POOLS = (Pool(name="hard", up_to=0.2), Pool(name="medium", up_to=0.8, share=2), Pool(name="easy"))


def queue_of(
    curriculum: Curriculum, size: int = 8, *, seed: int = 0, shuffle: bool = True, **columns: Any
) -> PromptQueue:
    table = pa.table({"prompt_ids": [[k] for k in range(size)], **columns})
    return PromptQueue(curriculum, table, name="sums", seed=seed, shuffle=shuffle)


def draw(queue: PromptQueue, number: int, step: int = 1, at_work: tuple[int, ...] = ()) -> list[int]:
    queue.begin(step, at_work)
    return list(islice(queue, number))


def answered(queue: PromptQueue, prompts: list[int], solved: int, votes: int = 4, step: int = 1) -> None:
    for prompt in prompts:
        queue.record(prompt, solved, votes, step)


def copied(queue: PromptQueue, size: int, **columns: Any) -> PromptQueue:
    other = queue_of(queue.curriculum, size, seed=queue._seed, shuffle=queue._shuffle, **columns)
    other.restore(queue.table())
    return other


# Order


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_settings_the_first_epoch_has_the_usual_order(shuffle: bool):
    queue = queue_of(Curriculum(), 12, seed=5, shuffle=shuffle)
    drawn: list[int] = []
    for _ in range(4):
        drawn += (now := draw(queue, 3))
        answered(queue, now, 2)
    assert drawn == list(islice(positions(12, 5, shuffle=shuffle), 12))


def test_each_epoch_has_every_prompt_once_in_a_new_order():
    queue, epochs = queue_of(Curriculum(), 12), []
    for _ in range(3):
        epoch: list[int] = []
        for _ in range(4):
            epoch += (now := draw(queue, 3))
            answered(queue, now, 2)
        epochs.append(epoch)
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_outcomes_of_a_step_may_arrive_in_any_order():
    orders = []
    for way in (lambda ids: ids, lambda ids: ids[::-1]):
        queue, drawn = queue_of(Curriculum(pools=POOLS, retire=(Gate(at_least=1.0),)), 20), []
        for step in range(1, 30):
            now = draw(queue, 5, step)
            drawn.append(now)
            for prompt in way(now):
                queue.record(prompt, prompt % 5, 4, step)
        orders.append(drawn)
    assert orders[0] == orders[1]


def test_more_prompts_than_there_are_come_more_than_once():
    queue = queue_of(Curriculum(), 3)
    drawn = draw(queue, 8)
    assert set(Counter(drawn).values()) == {2, 3}
    answered(queue, drawn, 1)
    assert sorted(draw(queue, 3)) == [0, 1, 2]


# Gates


def test_a_prompt_that_was_solved_16_of_16_times_twice_retires():
    queue = queue_of(Curriculum(retire=(Gate(at_least=1.0, times=2),), votes=16), 2)
    for solved in (16, 15, 16):  # one failure in between
        queue.record(0, solved, 16, 1)
    assert queue.metrics()["curriculum/retired"] == 0
    queue.record(0, 16, 16, 4)
    assert queue.metrics()["curriculum/retired"] == 1
    assert set(draw(queue, 1) + draw(queue, 1)) <= {1, 0} and queue._retired[0] in (4, -1)


def test_lost_rows_are_no_failures_and_small_groups_do_not_count():
    queue = queue_of(Curriculum(retire=(Gate(at_least=1.0), Gate(at_most=0.0)), votes=12), 4)
    queue.record(0, 14, 14, 1)  # two rows were lost
    queue.record(0, 0, 3, 2)  # nearly all were lost: neither solved nor failed
    queue.record(0, 16, 16, 3)
    queue.record(1, 0, 0, 1)
    queue.record(1, 0, 0, 2)
    assert queue._retired.tolist() == [3, -1, -1, -1]
    assert queue.metrics()["curriculum/unmeasured"] == 3


def test_a_retired_prompt_returns_and_its_next_group_decides():
    queue = queue_of(
        Curriculum(retire=(Gate(at_least=1.0, times=2, return_after=10),)), 2, shuffle=False
    )
    queue.record(0, 4, 4, 1)
    queue.record(0, 4, 4, 2)
    for step in range(3, 12):
        assert draw(queue, 1, step) == [1]
        answered(queue, [1], 2, step=step)
    assert queue._retired[0] == 2
    drawn = draw(queue, 2, 12)
    assert sorted(drawn) == [0, 1] and queue.metrics()["curriculum/returned"] == 1
    queue.record(0, 4, 4, 12)
    assert queue._retired[0] == 12
    queue.begin(22, [1])
    queue.record(0, 3, 4, 22)
    assert queue._retired[0] == -1


def test_a_gate_for_prompts_that_are_never_solved_counts_groups_in_a_row():
    queue = queue_of(Curriculum(retire=(Gate(at_most=0.0, times=3),)), 2)
    for solved in (0, 0, 1, 0, 0):
        queue.record(0, solved, 8, 1)
    assert queue._retired[0] == -1
    queue.record(0, 0, 8, 6)
    assert queue._retired[0] == 6


def test_bounds_are_exact():
    groups = [(29, 100)]
    assert Gate(at_least=0.29, times=1).passes(groups) and Gate(at_most=0.29, times=1).passes(groups)
    queue = queue_of(Curriculum(pools=(Pool(name="hard", up_to=0.29), Pool(name="easy"))), 1)
    answered(queue, draw(queue, 1), 29, 100)
    assert queue.metrics()["curriculum/in_hard"] == 1


def test_if_no_prompt_is_left_the_one_that_retired_first_returns():
    queue = queue_of(Curriculum(retire=(Gate(at_least=1.0, times=1),)), 4)
    first = draw(queue, 2, 1)
    answered(queue, first[::-1], 4, step=1)
    answered(queue, draw(queue, 2, 2), 4, step=2)
    assert queue.metrics()["curriculum/active"] == 0
    assert draw(queue, 2, 3) == sorted(first), "of one step, in the order of the data"
    assert queue.metrics()["curriculum/returned"] == 2


# Pools and sources


def test_pools_get_their_shares_of_the_prompts_that_are_drawn():
    queue = queue_of(Curriculum(pools=POOLS), 90)
    for prompt in draw(queue, 90):
        queue.record(prompt, (0, 5, 10)[prompt % 3], 10, 1)
    found = {
        name: queue.metrics()[f"curriculum/in_{name}"] for name in ("new", "hard", "medium", "easy")
    }
    assert found == {"new": 0, "hard": 30, "medium": 30, "easy": 30}
    drawn = Counter(prompt % 3 for prompt in draw(queue, 40))
    assert drawn == {0: 10, 1: 20, 2: 10}


def test_the_pool_of_a_prompt_follows_its_last_two_groups():
    queue = queue_of(Curriculum(pools=POOLS), 1)
    pools = []
    for solved in (0, 4, 4, 4):  # rates over two groups: 0, 1/2, 1, 1
        queue.record(0, solved, 4, 1)
        pools.append(queue.pool_names[queue._pool[0]])
    assert pools == ["hard", "medium", "easy", "easy"]


def test_sources_get_their_weights_however_many_rows_they_have():
    names = ["small"] * 10 + ["large"] * 90
    even = Curriculum(sources="of", weights={"small": 1, "large": 1})
    drawn = draw(queue_of(even, 100, of=names), 16)
    assert sum(prompt < 10 for prompt in drawn) == 8
    by_rows = draw(queue_of(Curriculum(sources="of"), 100, of=names), 20)
    assert sum(prompt < 10 for prompt in by_rows) == 2


def test_source_weights_follow_measured_solve_rates():
    """Hand-worked: 4 prompts of each source, 6 votes each. With the rate of succession, the first
    source has rate 4/8, so learnability 1/4; the second has 7/8, so 7/64: a share of 16 to 7."""
    names = ["half"] * 4 + ["solved"] * 4
    queue = queue_of(Curriculum(sources="of", follow=learnability), 8, of=names)
    assert queue.metrics()["curriculum/weight_of_half"] == 0.5
    assert sorted(draw(queue, 8)) == list(range(8))
    answered(queue, [0, 1, 2, 3], 3, 6)
    answered(queue, [4, 5, 6, 7], 6, 6)
    found = queue.metrics()
    assert found["curriculum/weight_of_half"] == pytest.approx(16 / 23)
    assert found["curriculum/solve_rate_of_solved"] == 1 and found["curriculum/solve_rate"] == 0.75
    drawn = [p for _ in range(230) for p in _one(queue)]
    assert abs(sum(prompt < 4 for prompt in drawn) - 160) <= 1


def _one(queue: PromptQueue) -> list[int]:
    """Draw a prompt, and give the whole group no vote, so that no rate changes."""
    drawn = draw(queue, 1)
    answered(queue, drawn, 0, 0)
    return drawn


def test_no_source_falls_below_a_twentieth_of_the_largest():
    queue = queue_of(Curriculum(sources="of", follow=lambda rate: float(rate < 0.6)), 2, of=["a", "b"])
    for _ in range(2):
        queue.record(1, 64, 64, 1)
    assert queue.metrics()["curriculum/weight_of_b"] == pytest.approx(0.05 / 1.05)


def test_the_functions_of_solve_rates_are_the_papers():
    assert [learnability(p) for p in (0.0, 0.25, 1.0)] == [0.0, 0.1875, 0.0]
    assert [unsolved(p) for p in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]


# Lost groups


def test_a_prompt_whose_group_was_lost_is_drawn_again_after_the_others_and_counted():
    queue = queue_of(Curriculum(), 4, shuffle=False)
    assert draw(queue, 3) == [0, 1, 2]
    queue.record(0, 1, 4, 1)
    assert draw(queue, 3, 2, at_work=(2,)) == [3, 0, 1], "a prompt that always fails holds up no other"
    assert queue.metrics()["curriculum/lost_groups"] == 1
    assert queue.metrics()["curriculum/unmeasured"] == 3


# State


def _random_curriculum(chance: random.Random) -> Curriculum:
    gates = (Gate(at_least=1.0, times=chance.randint(1, 3), return_after=chance.choice([None, 3])),)
    never = (Gate(at_most=0.0, times=2, return_after=5),)
    of_sources: dict[str, Any] = {}
    if chance.random() < 0.5:
        of_sources = {"sources": "of", "follow": chance.choice([None, learnability, unsolved])}
    return Curriculum(
        votes=chance.randint(1, 3),
        pools=POOLS if chance.random() < 0.7 else (),
        retire=gates * chance.randint(0, 1) + never * chance.randint(0, 1),
        **of_sources,
    )


def _check(
    queue: PromptQueue, in_flight: Counter[int], history: dict[int, list[tuple[int, int]]]
) -> None:
    """Compare with the whole history of each prompt."""
    curriculum = queue.curriculum
    for prompt in range(len(queue._queue)):
        is_queued, is_retired = queue._queue[prompt] >= 0, queue._retired[prompt] >= 0
        assert is_queued + is_retired + (in_flight[prompt] > 0) >= 1, "no prompt is forgotten"
        assert not (is_queued and is_retired)
        groups = history.get(prompt, [])[::-1]
        recent = groups[:RECENT]
        if curriculum.pools:
            votes = sum(v for _, v in recent)
            rate = sum(s for s, _ in recent) / votes if votes else None
            wanted = "new" if rate is None else next(p.name for p in curriculum.pools if rate <= p.up_to)
            assert queue.pool_names[queue._pool[prompt]] == wanted
        if is_retired:
            assert any(gate.passes(groups) for gate in curriculum.retire)
    assert sum(queue._lengths) == (queue._queue >= 0).sum()
    assert +queue._in_flight == +in_flight


@pytest.mark.parametrize("seed", range(10))
def test_a_queue_that_is_killed_at_random_moments_draws_what_it_would_have_drawn(seed: int):
    chance = random.Random(seed)
    curriculum, size = _random_curriculum(chance), chance.choice([3, 8, 20])
    columns: dict[str, Any] = {"of": [f"source {k % 3}" for k in range(size)]}
    whole = queue_of(curriculum, size, seed=seed, **columns)
    killed = queue_of(curriculum, size, seed=seed, **columns)
    in_flight: Counter[int] = Counter()
    history: dict[int, list[tuple[int, int]]] = {}
    for step in range(1, 60):
        lost = [p for p in in_flight.elements() if chance.random() < 0.05]
        in_flight -= Counter(lost)
        drawn = draw(whole, number := chance.randint(1, 6), step, tuple(in_flight.elements()))
        if chance.random() < 0.5:
            killed = copied(killed, size, **columns)
        assert draw(killed, number, step, tuple(in_flight.elements())) == drawn
        in_flight += Counter(drawn)
        # Some groups end now, others in a later step.
        ended = [p for p in in_flight.elements() if chance.random() < 0.7]
        results = [(p, chance.choice([0, 0, 2, 4, 4]), 4 if chance.random() < 0.8 else 2) for p in ended]
        for prompt, solved, votes in results:
            solved = min(solved, votes)
            whole.record(prompt, solved, votes, step)
            if votes >= curriculum.votes:
                history.setdefault(prompt, []).append((solved, votes))
        for at, (prompt, solved, votes) in enumerate(results):
            if at == len(results) // 2 and chance.random() < 0.5:
                killed = copied(killed, size, **columns)
            killed.record(prompt, min(solved, votes), votes, step)
        in_flight -= Counter(ended)
        _check(whole, in_flight, history)
        assert killed.metrics() == whole.metrics()
        assert killed.table().equals(whole.table(), check_metadata=True)


def test_a_checkpoint_keeps_the_state_in_a_file(tmp_path: Path):
    queue = queue_of(Curriculum(pools=POOLS), 5)
    answered(queue, draw(queue, 2), 4)
    write_state(tmp_path, queue.table())
    found = read_state(tmp_path)
    assert found is not None and found.equals(queue.table(), check_metadata=True)
    assert found["pool"].to_pylist().count("easy") == 2
    assert read_state(tmp_path / "nowhere") is None


def test_changed_pools_and_gates_apply_to_the_measured_rates():
    queue = queue_of(Curriculum(retire=(Gate(at_least=1.0, times=1),)), 6)
    first = draw(queue, 3)
    answered(queue, first[:2], 4)
    answered(queue, first[2:], 0)
    other = queue_of(Curriculum(pools=POOLS, retire=(Gate(at_most=0.0, times=5),)), 6)
    other.restore(queue.table())
    found = other.metrics()
    assert [found[f"curriculum/in_{name}"] for name in ("new", "hard", "easy")] == [3, 1, 2]
    assert found["curriculum/retired"] == 0
    assert len(set(draw(other, 6))) == 6


def test_the_state_of_other_prompts_is_refused():
    with pytest.raises(UserError, match=r"prompts.arrow has 5 prompts in format 1; the data has 6"):
        queue_of(Curriculum(), 6).restore(queue_of(Curriculum(), 5).table())


# Mistakes


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gate(), "a gate has one bound: at_least=... or at_most=..."),
        (lambda: Gate(at_least=1.0, at_most=0.0), "a gate has one bound"),
        (lambda: Pool(name="new"), "other than 'new', not 'new'"),
        (lambda: Pool(name="a b"), "a word in small letters"),
        (lambda: Curriculum(pools=(Pool(name="a", up_to=0.5),)), "the last of 1, not \\[0.5\\]"),
        (lambda: Curriculum(pools=(Pool(name="a", up_to=0.5), Pool(name="a"))), "called 'a'; rename"),
        (lambda: Curriculum(follow=unsolved), "need sources=..., the column"),
        (lambda: Curriculum(sources="of", weights={"a": 0.0}), "'a' has weight 0.0; it must be above 0"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Any], said: str):
    with pytest.raises(SettingError, match=said):
        make()


@pytest.mark.parametrize(
    ("curriculum", "names", "said"),
    [
        (Curriculum(sources="off"), ["a", "b"], "no such column; did you mean 'of'?"),
        (Curriculum(sources="of"), ["a", None], "row 2 names no source; fill the column in"),
        (Curriculum(sources="of", weights={"aa": 1.0, "b": 1.0}), ["a", "b"], "there is no source 'aa'"),
        (
            Curriculum(sources="of", weights={"a": 1.0}),
            ["a", "b"],
            "lacks the source 'b'; add its weight",
        ),
    ],
)
def test_sources_that_do_not_fit_the_data_are_refused(
    curriculum: Curriculum, names: list[str | None], said: str
):
    with pytest.raises(UserError, match=said.replace("?", "\\?")):
        queue_of(curriculum, 2, of=names)


def test_a_function_of_solve_rates_must_return_a_number():
    queue = queue_of(Curriculum(sources="of", follow=lambda rate: np.nan), 2, of=["a", "b"])
    with pytest.raises(
        UserError, match=r"\(0.500\) returned nan; it must return a number of at least 0"
    ):
        draw(queue, 1)


# Mixtures


def sums(rows: list[dict[str, Any]], name: str) -> Prompts:
    return Prompts.from_rows(rows, BYTES, name=name)


BYTES = Tokenizer(Backend(models.BPE({c: i for i, c in enumerate("0123456789+")}, [])))


def test_a_mixture_names_the_source_of_each_row_and_keeps_answers_and_columns():
    easy = sums([{"prompt": "1+2", "answer": 3, "level": 1}, {"prompt": "2+2", "answer": [4]}], "a")
    hard = sums([{"prompt": "12+34", "answer": "46", "note": "x"}], "b")
    mixed = Prompts.mix({"easy": easy, "hard": hard})
    assert mixed.name == "easy+hard" and len(mixed) == 3
    assert mixed.table["source"].to_pylist() == ["easy", "easy", "hard"]
    assert mixed.table["answer"].to_pylist() == [3, [4], "46"]
    assert mixed.table["note"].to_pylist() == [None, None, "x"]
    assert mixed.table["prompt_ids"].to_pylist()[2] == [1, 2, 10, 3, 4]
    assert {"source", "level", "note"} <= mixed.file_columns
    assert str(mixed.understood).count("read as") == 2
    kept = mixed.filter(lambda row: row["source"] == "hard").with_curriculum(Curriculum())
    assert len(kept) == 1 and kept.dropped == 2 and kept.curriculum is not None
    assert "filter" in str(kept.understood)
    assert kept.sort(lambda row: row["prompt"]).curriculum is kept.curriculum


def test_sources_that_cannot_be_mixed_are_refused():
    one = sums([{"prompt": "1+2", "level": 1}], "a")
    with pytest.raises(UserError, match=r"got no sources"):
        Prompts.mix({})
    with pytest.raises(UserError, match=r"writes the column 'source', which a source has; rename it"):
        Prompts.mix({"a": sums([{"prompt": "1+2", "source": "x"}], "a")})
    dated = pa.table({"prompt": ["1+2"], "level": [datetime.date(2026, 1, 1)]})
    with pytest.raises(UserError, match=r"column 'level' has different types \(a: int64, b: date32"):
        Prompts.mix({"a": one, "b": Prompts.from_rows(dated, BYTES)})


@pytest.mark.slow
def test_a_draw_costs_microseconds_however_many_prompts_there_are():
    curriculum = Curriculum(pools=POOLS, retire=(Gate(at_least=1.0),), sources="of", follow=learnability)

    def seconds(size: int) -> float:
        chance = random.Random(0)
        queue = queue_of(curriculum, size, of=[f"source {k % 3}" for k in range(size)])
        began, in_flight = time.process_time(), list[int]()
        for step in range(1, 101):
            in_flight = draw(queue, 256, step, tuple(in_flight))
            for prompt in in_flight:
                queue.record(prompt, chance.randint(0, 8), 8, step)
        return (time.process_time() - began) / (100 * 256)

    small, large = seconds(10_000), seconds(200_000)
    print(
        f"a draw and its outcome: {small * 1e6:.0f} us of 10,000, {large * 1e6:.0f} us of 200,000 prompts"
    )
    assert large < 1e-3 and large < 5 * small
