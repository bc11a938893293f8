"""Selection drops near-duplicates and leaks, with reasons, and chooses the rows with the most information."""

import itertools
import math
import random
import re
import time

import numpy as np
import pytest

from weft.dataflow.errors import UserError
from weft.dataflow.prompts.files import rows_in_memory
from weft.dataflow.prompts.formats import ReadSettings, find_format
from weft.dataflow.prompts.selection import (
    LEAST_SIMILARITY,
    Dropped,
    Labels,
    drop_similar,
    prompt_texts,
    select,
)

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "pu") for b in ("bar", "dor", "fin", "gus", "han")]


def sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(words))


def jaccard(one: str, other: str) -> float:
    """An independent reference: sets of 5 consecutive words."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[k : k + 5]) for k in range(len(words) - 4)} or {tuple(words)}

    return len(runs(one) & runs(other)) / len(runs(one) | runs(other))


# Near-duplicates


def test_a_near_duplicate_is_dropped_with_the_row_that_it_is_like():
    first = "Anna has 3 red apples and buys 4 more at the market in town. How many does she have?"
    texts = [first, "A different question altogether, about pears.", first.replace("red ", "green ")]
    assert drop_similar(texts) == []
    same = first.upper().replace(".", "!")
    assert drop_similar([*texts, same]) == [Dropped(3, "near_duplicate", 0, 1.0)]


def test_similar_prompts_with_different_answers_are_different_tasks_but_may_be_leaks():
    long = sentence(random.Random(8), 40)
    texts = [f"{long}. She has {k} apples. How many?" for k in (3, 4)]
    assert jaccard(*texts) >= 0.7
    assert [one.row for one in drop_similar(texts, threshold=0.7)] == [1]
    assert drop_similar(texts, ["3", "4"], threshold=0.7) == []
    found = drop_similar(texts[:1], ["3"], texts[1:], threshold=0.7)
    assert [(one.row, one.reason, one.of) for one in found] == [(0, "held_out", 0)]


def test_sums_with_other_numbers_or_signs_are_no_duplicates():
    texts = ["2 + 3 =", "2 - 3 =", "3 + 2 =", "2 + 33 =", "2 + 3 ="]
    assert drop_similar(texts) == [Dropped(4, "near_duplicate", 0, 1.0)]


def test_similarities_are_those_of_a_reference():
    chance = random.Random(0)
    texts: list[str] = []
    for _ in range(60):
        words = sentence(chance, 60).split()
        texts.append(" ".join(words))
        for changed in (1, 3, 6):
            other = list(words)
            for at in chance.sample(range(60), changed):
                other[at] = "changed"
            texts.append(" ".join(other))
    found = {one.row: one for one in drop_similar(texts, threshold=0.8)}
    assert found
    for row, one in found.items():
        assert one.of is not None and one.of < row and one.of not in found
        assert one.similarity == pytest.approx(jaccard(texts[row], texts[one.of]))
    kept = [row for row in range(len(texts)) if row not in found]
    missed = [(a, b) for a, b in itertools.combinations(kept, 2) if jaccard(texts[a], texts[b]) >= 0.8]
    assert missed == []


def test_equal_texts_without_words_are_duplicates():
    assert [one.row for one in drop_similar(["", "?", "a"])] == [1]


def test_a_similarity_that_would_miss_pairs_is_refused():
    with pytest.raises(UserError, match=r"similarity 0.5: it must be from 0.7 to 1"):
        drop_similar(["a"], threshold=0.5)
    assert LEAST_SIMILARITY == 0.7


# Leaks


def test_a_prompt_with_13_words_of_a_held_out_prompt_is_a_leak():
    chance = random.Random(1)
    secret = sentence(chance, 13)
    texts = [f"{sentence(chance, 30)} {secret} {sentence(chance, 30)}"]
    texts += [f"{sentence(chance, 30)} {secret.rpartition(' ')[0]} {sentence(chance, 30)}"]
    assert drop_similar(texts, None, [secret]) == [Dropped(0, "held_out", 0)]


def test_a_short_held_out_prompt_leaks_if_another_has_all_of_its_words():
    texts = ["Please answer: how many legs do eight spiders have together? Think.", "How many legs?"]
    assert drop_similar(texts, None, ["How many legs do eight spiders have together?"]) == [
        Dropped(0, "held_out", 0)
    ]


def test_words_of_a_template_are_no_leak():
    template = "Solve the following problem and give the final answer in a box at the end"
    chance = random.Random(2)
    texts = [f"{template}: {sentence(chance, 30)}" for _ in range(30)]
    held_out = [f"{template}: {sentence(chance, 30)}" for _ in range(3)]
    assert drop_similar(texts, None, held_out) == []
    assert [one.row for one in drop_similar([*texts, held_out[1]], None, held_out)] == [30]


# Information


def brute_information(rows: list[list[str]], chosen: tuple[int, ...]) -> float:
    """An independent reference in plain Python, for unit quality."""
    labels = sorted({label for row in rows for label in row})
    rows_of = {a: sum(a in row for row in rows) for a in labels}
    edges: dict[str, dict[str, float]] = {}
    for a in labels:
        near = {}
        for b in labels:
            both = sum(a in row and b in row for row in rows)
            weight = both / math.sqrt(rows_of[a] * rows_of[b])
            if a != b and weight >= 0.2:
                near[b] = weight
        heaviest = sorted(near, key=lambda b: (-near[b], b))[:5]
        edges[a] = {a: 1.0, **{b: near[b] for b in heaviest}}
    weight = dict.fromkeys(labels, 0.0)
    for row in chosen:
        for a in rows[row]:
            total = sum(edges[a].values())
            for b, share in edges[a].items():
                weight[b] += share / total / len(rows[row])
    return sum(w**0.8 for w in weight.values())


def test_the_information_of_rows_is_that_of_a_reference():
    chance = random.Random(3)
    rows = [sorted(chance.sample("abcdefgh", chance.randint(1, 4))) for _ in range(12)]
    graph = Labels.of(rows, [""] * 12, np.ones(12))
    for size in (1, 4, 12):
        chosen = tuple(sorted(chance.sample(range(12), size)))
        assert graph.information(np.array(chosen)) == pytest.approx(brute_information(rows, chosen))


def test_a_hand_worked_selection():
    """Labels that never occur together have no edges. A row with one label gives it 1, one with two
    gives each 1/2: gains 1 and 2 (1/2)^0.8 = 1.149. So the pair x, y comes first (row 3), then the
    first row with a label that has nothing, `a` (gain 1); another `a` would gain 2^0.8 - 1 = 0.741.
    After it, `z` gains 1."""
    rows = [["a"], ["a"], ["z"], ["x", "y"]]
    graph = Labels.of(rows, [""] * 4, np.ones(4))
    assert graph.information(np.array([3])) == pytest.approx(2 * 0.5**0.8)
    assert list(graph.choose(4)) == [3, 0, 2, 1]
    found = select(list("pqrs"), labels=rows, rows=2)
    assert found.kept.tolist() == [0, 3]
    assert [(one.row, one.reason) for one in found.dropped] == [(1, "redundant"), (2, "redundant")]


def test_quality_multiplies_the_weight_of_a_row():
    graph = Labels.of([["a"], ["b"]], ["", ""], np.array([1.0, 3.0]))
    assert graph.information(np.array([1])) == pytest.approx(3**0.8)
    assert list(graph.choose(1)) == [1]
    assert list(Labels.of([["a"], ["b"]], ["", ""], np.array([1.0, 0.0])).choose(1)) == [0]


def test_information_is_monotone_and_has_falling_gains():
    chance = random.Random(4)
    rows = [sorted(chance.sample("abcdefghij", 3)) for _ in range(20)]
    graph = Labels.of(rows, [""] * 20, np.ones(20))
    for _ in range(50):
        order = chance.sample(range(20), 20)
        small, large, new = order[:3], order[:9], order[10]
        gains = [
            graph.information(np.array([*base, new])) - graph.information(np.array(base))
            for base in (small, large)
        ]
        assert gains[0] >= gains[1] - 1e-12 and gains[1] > 0


def test_the_greedy_choice_is_near_the_best_one():
    chance = random.Random(5)
    for _ in range(10):
        rows = [sorted(chance.sample("abcdefghij", 3)) for _ in range(9)]
        graph = Labels.of(rows, [""] * 9, np.ones(9))
        best = max(graph.information(np.array(one)) for one in itertools.combinations(range(9), 3))
        found = graph.information(np.array(list(graph.choose(3))))
        assert found >= (1 - 1 / math.e) * best


def test_a_choice_of_words_covers_rare_topics():
    chance = random.Random(6)
    common = [f"apples pears plums {sentence(chance, 4)}" for _ in range(400)]
    rare = [f"topic{k} matter{k} item{k} thing{k}" for k in range(20) for _ in range(2)]
    rare = [f"{text} {'again' * (k % 2)}" for k, text in enumerate(rare)]
    found = select([*common, *rare], rows=60)
    covered = {k // 2 for k in (found.kept - 400).tolist() if k >= 0}
    assert len(covered) == 20
    assert found.information is not None and found.random_information is not None
    assert found.information > 1.2 * found.random_information


def test_all_rows_stay_if_fewer_are_left_than_wanted():
    found = select(["a b c", "a b c", "d e f"], rows=5)
    assert found.kept.tolist() == [0, 2] and found.information is None


def test_rows_without_labels_come_last():
    assert list(Labels.of([[], ["a"], []], [""] * 3, np.ones(3)).choose(3)) == [1, 0, 2]
    assert select(["one", "two", "six"], rows=2).kept.tolist() == [0, 1]


# Texts


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "2 + 2?"}, "2 + 2?"),
        ({"question": "2 + 2?", "answer": "4"}, "2 + 2?"),
        ({"instruction": "Add.", "input": "2 and 2", "output": "4"}, "Add.\n\n2 and 2"),
        (
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "2 + 2?"},
                    {"role": "assistant", "content": "4"},
                ]
            },
            "2 + 2?",
        ),
        ({"conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "4"}]}, "2?"),
        ({"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}, "2 + 2 = "),
        ({"text": "2 + 2 = 4"}, "2 + 2 = 4"),
        ({"text": "Write add.", "code": "def", "test_list": ["assert 1"]}, "Write add.\n\nassert 1"),
    ],
)
def test_every_format_gives_the_text_of_its_prompt(row: dict[str, object], text: str):
    rows = rows_in_memory([row], "rows")
    assert prompt_texts(rows, find_format(rows, ReadSettings())) == [text]


@pytest.mark.slow
def test_100_000_rows_take_minutes_at_most_and_twice_as_many_about_twice_as_long():
    def seconds(number: int) -> float:
        chance = random.Random(7)
        known = [f"w{k}" for k in range(20_000)]
        # Words are as frequent as in texts (Zipf).
        weights = np.cumsum(1 / np.arange(1, 20_001)).tolist()
        texts = [" ".join(chance.choices(known, cum_weights=weights, k=45)) for _ in range(number)]
        began = time.process_time()
        found = select(texts, held_out=texts[:500], rows=number // 10)
        assert len(found.kept) == number // 10
        assert sum(one.reason == "held_out" for one in found.dropped) >= 500
        return time.process_time() - began

    half, whole = seconds(50_000), seconds(100_000)
    print(f"50,000 rows: {half:.1f} s; 100,000 rows: {whole:.1f} s of CPU")
    assert whole < 600 and whole < 3 * half
