"""Drafts: the text that they continue, their acceptance, and whether they pay."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.dataflow.errors import UserError
from weft.dataflow.metrics import merge
from weft.workers.generation.speculation import DraftCounts, Payoff, Speculation
from weft.workers.generation.suffix_drafts import (
    MATCH,
    MAX_RESPONSES,
    Drafts,
    NgramDrafter,
    SuffixDrafter,
)
from weft.workers.generation.vllm_settings import VllmSettings


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


# Suffix drafts

PROMPT = ids(90, 91, 92)


def test_a_draft_continues_what_a_sibling_wrote_after_the_same_tokens():
    drafts = Drafts()
    drafts.update("a", PROMPT, ids(1, 2, 3, 4, 5, 6, 7, 8))
    drafts.update("b", PROMPT, ids(50, 2, 3))
    assert drafts.draft("b", 4) == [], "only two tokens are equal"
    drafts.update("b", PROMPT, ids(50, 2, 3, 4))
    assert drafts.draft("b", 4) == [5, 6, 7], "as many as are equal"
    drafts.update("b", PROMPT, ids(50, 2, 3, 4, 5))
    assert drafts.draft("b", 2) == [6, 7]
    assert drafts.draft("b", 0) == drafts.draft("b", -3) == []
    drafts.update("b", PROMPT, ids(50, 2, 3, 4, 5, 60))
    assert drafts.draft("b", 4) == [], "it went another way"


def test_the_first_tokens_are_drafted_after_the_end_of_the_prompt():
    drafts = Drafts()
    drafts.update("a", PROMPT, ids(1, 2, 3))
    drafts.update("b", PROMPT, ids(1))
    assert drafts.draft("b", 4) == [2, 3]


def test_a_draft_continues_the_prompt_and_the_response_itself():
    drafts = Drafts()
    drafts.update("a", ids(5, 6, 7, 8, 9, 10), ids(5, 6, 7))
    assert drafts.draft("a", 4) == [8, 9, 10]
    drafts.update("a", ids(5, 6, 7, 8, 9, 10), ids(5, 6, 7, 0, 1, 2, 3, 4, 0, 1, 2))
    assert drafts.draft("a", 4) == [3, 4, 0]


def test_the_latest_text_counts():
    drafts = Drafts()
    drafts.update("a", PROMPT, ids(1, 2, 3, 4))
    drafts.update("b", PROMPT, ids(1, 2, 3, 5))
    drafts.update("c", PROMPT, ids(0, 1, 2, 3))
    assert drafts.draft("c", 1) == [5]
    drafts.update("a", PROMPT, ids(1, 2, 3, 4, 1, 2, 3, 6))
    assert drafts.draft("c", 1) == [5], "it goes on with the text that it follows"
    drafts.update("d", PROMPT, ids(0, 1, 2, 3))
    assert drafts.draft("d", 1) == [6], "the text that it followed ends here"


def test_a_response_that_repeats_itself_is_drafted_beyond_its_end():
    drafts = Drafts()
    drafts.update("a", PROMPT, ids(1, 2, 1, 2, 1))
    assert drafts.draft("a", 4) == [2, 1, 2]
    drafts.update("a", PROMPT, ids(1, 2, 1, 2, 1, 2))
    assert drafts.draft("a", 4) == [1, 2, 1, 2]
    drafts.update("b", PROMPT, ids(8, 8, 8, 8))
    assert drafts.draft("b", 4) == [8, 8, 8]


def test_responses_of_an_earlier_epoch_are_drafted_and_other_prompts_share_none():
    drafts = Drafts()
    drafts.update("a", PROMPT, ids(1, 2, 3, 4))
    drafts.keep(set())
    drafts.update("b", PROMPT, ids(1, 2))
    assert drafts.draft("b", 4) == [3, 4]
    drafts.update("c", ids(90, 91, 93), ids(1, 2, 3))
    assert drafts.draft("c", 4) == []


def test_n_grams_continue_the_prompt_and_the_response_itself_alone():
    drafts = Drafts(max_tokens=0, shared=False)
    drafts.update("a", PROMPT, ids(1, 2, 3, 4, 5, 1, 2, 3))
    drafts.update("b", PROMPT, ids(1, 2, 3))
    assert (drafts.draft("a", 2), drafts.draft("b", 2)) == ([4, 5], [])
    drafts.update("b", PROMPT, ids(1, 2, 3, 90, 91, 92))
    assert drafts.draft("b", 2) == [1, 2]
    drafts.keep({"a"})
    assert drafts.draft("a", 2) == [4, 5] and len(drafts) == 2 * MATCH + 8


def test_tokens_that_were_missed_are_added_later():
    drafts = Drafts()
    drafts.update("a", PROMPT, ids(1))
    drafts.update("a", PROMPT, ids(1, 2, 3, 4, 5))
    drafts.update("b", PROMPT, ids(2, 3, 4))
    assert drafts.draft("b", 4) == [5]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=60),
    st.lists(st.integers(0, 2), max_size=8),
)
def test_drafts_are_those_of_a_search_through_all_texts(
    steps: list[tuple[int, int]], prompt_tokens: list[int]
):
    drafts, prompt = Drafts(), ids(*prompt_tokens)
    head = prompt_tokens[-MATCH:]
    texts: dict[int, list[int]] = {}
    places: dict[int, tuple[list[int], int] | None] = {}
    lengths: dict[int, int] = {}
    seen = [(prompt_tokens, at) for at in range(MATCH, len(prompt_tokens))]
    """All places after `MATCH` tokens, the latest last."""
    for request, token in steps:
        text = texts.setdefault(request, list(head))
        place = places.get(request)
        if len(text) >= MATCH:
            seen.append((text, len(text)))
        text.append(token)
        if place is not None and place[0][place[1]] == token and place[1] + 1 < len(place[0]):
            places[request] = place[0], place[1] + 1
            lengths[request] += 1
        else:
            last = text[-MATCH:]
            found = [(t, at) for t, at in seen if len(last) == MATCH and t[at - MATCH : at] == last]
            places[request], lengths[request] = found[-1] if found else None, MATCH
        drafts.update(str(request), prompt, ids(*text[len(head) :]))
        place, expected = places[request], []
        if place is not None:
            period = len(place[0]) - place[1]
            rest = place[0][place[1] :] * (5 if place[0] is text and period > 0 else 1)
            expected = rest[: min(5, lengths[request])]
        assert drafts.draft(str(request), 5) == expected


def test_the_oldest_responses_and_the_prompts_that_were_used_first_are_dropped():
    drafts = Drafts(max_tokens=150)
    for number in range(3 * MAX_RESPONSES):
        drafts.update(str(number), PROMPT, ids(number, 1, 2, 3))
    drafts.keep(set())
    assert len(drafts) == len(PROMPT) + MAX_RESPONSES * (MATCH + 4)
    drafts.update("last", PROMPT, ids(0, 1, 2, 3))
    drafts.update("again", PROMPT, ids(3 * MAX_RESPONSES - 1, 1, 2))
    assert drafts.draft("again", 1) == [3]
    for number in range(20):
        drafts.update("one", ids(number, 7, 7), ids(*range(10)))
        drafts.keep({"again"})
    assert len(drafts) <= 150
    assert drafts.draft("again", 1) == [3], "a prompt with a running response stays"
    drafts.update("new", ids(0, 7, 7), ids(0, 1, 2))
    drafts.update("newest", ids(19, 7, 7), ids(0, 1, 2))
    assert (drafts.draft("new", 1), drafts.draft("newest", 1)) == ([], [3])


def test_the_drafter_answers_for_each_row_of_the_batch():
    drafter = SuffixDrafter(SimpleNamespace(model_config=SimpleNamespace(max_model_len=12)))
    rows = np.zeros((4, 12), np.int32)
    rows[0, :8] = [90, 91, 92, 1, 2, 3, 4, 5]
    rows[1, :6] = [90, 91, 92, 0, 1, 2]
    ends = np.array([8, 6, 3, 99])
    assert drafter.propose([[5], [2], []], ends, rows) == [[], [], []], "it has not been attached"
    batch = SimpleNamespace(req_ids=["a", "b", "c"], num_prompt_tokens=np.array([3, 3, 3]))
    drafter.runner, drafter.tokens = SimpleNamespace(input_batch=batch), 4
    drafter.propose([[5], [2], []], ends, rows, slot_mappings=None)
    rows[1, 6], ends[1] = 3, 7
    assert drafter.propose([[], [3], []], ends, rows) == [[], [4, 5], []]
    drafter.tokens = 0
    assert drafter.propose([[], [3], []], ends, rows) == [[], [], []], "drafts are off"
    drafter.tokens = 4
    rows[1, 7:11], ends[1] = [4, 5, 1, 2], 11
    assert drafter.propose([[], [2], []], ends, rows) == [[], [], []], "there is no room for a draft"


# Which drafts pay


def played(payoff: Payoff, responses: int, steps: int, with_drafts: float, without: float) -> list[bool]:
    """Return which of these steps draft. A step takes `with_drafts` or `without` seconds per token."""
    found: list[bool] = []
    for _ in range(steps):
        found.append(payoff.decide(responses))
        payoff.note(seconds=10 * (with_drafts if found[-1] else without), tokens=10)
    return found


def test_drafts_go_on_for_batches_where_they_pay_and_off_where_they_do_not():
    payoff = Payoff()
    for responses, with_drafts in ((4, 0.5), (200, 2.0)):
        steps = played(payoff, responses, 2 * Payoff.CYCLE, with_drafts, without=1.0)
        assert steps[: 2 * Payoff.TRIAL] == [True] * Payoff.TRIAL + [False] * Payoff.TRIAL
        share = sum(steps) / len(steps)
        assert share > 0.96 if with_drafts < 1 else share < 0.04
    assert played(payoff, 5, 1, 0, 0) == [True], "4 to 7 responses share their measurement"


def test_a_change_of_the_costs_is_noticed_within_two_cycles():
    payoff = Payoff()
    assert played(payoff, 4, Payoff.CYCLE, 0.5, without=1.0)[-1]
    assert not played(payoff, 4, Payoff.CYCLE, 2.0, without=1.0)[-1]
    assert played(payoff, 4, Payoff.CYCLE, 0.5, without=1.0)[-1]


def test_slow_steps_and_the_first_after_a_change_do_not_count():
    payoff = Payoff()
    steps: list[bool] = []
    for step in range(3 * Payoff.TRIAL):
        steps.append(payoff.decide(8))
        changed = step in (0, Payoff.TRIAL)
        slow = 100.0 if changed or step % 5 == 0 else 1.0
        payoff.note(seconds=slow * (0.9 if steps[-1] else 1.0), tokens=1)
    assert steps[-1]


def test_a_limit_replaces_the_measurement():
    payoff = Payoff(off_above=16)
    assert [payoff.decide(n) for n in (1, 16, 17, 300)] == [True, True, False, False]
    assert not Payoff(off_above=0).decide(1)


def test_acceptance_is_counted_for_each_position_of_a_draft():
    first, second = DraftCounts(), DraftCounts()
    first.note(drafted=3, accepted=3)
    first.note(drafted=3, accepted=1)
    second.note(drafted=1, accepted=0)
    assert DraftCounts().metrics() == {}
    found = merge([first.metrics(), second.metrics()])
    assert {name: metric.value for name, metric in found.items()} == {
        "draft_acceptance": 4 / 7,
        "draft_acceptance_1": 2 / 3,
        "draft_acceptance_2": 1 / 2,
        "draft_acceptance_3": 1 / 2,
    }


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "draft_model"}, r"method='draft_model' needs a draft model; pass model=\.\.\."),
        ({"model": "m"}, r"method='suffix' takes no draft model; leave out model='m', or choose"),
        ({"tokens": 0}, "tokens: input should be greater than or equal to 1"),
        ({"method": "ngramm"}, "did you mean 'ngram'"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        Speculation(**settings)


def engine_arguments(folder: Path, free_share: float | None = None, **settings: Any) -> dict[str, Any]:
    made = VllmSettings(max_num_seqs=64, speculation=Speculation(**settings))
    return made.engine_arguments(
        str(folder), max_context=64, dtype="auto", seed=0, free_share=free_share
    )


def test_vllm_gets_its_own_settings_for_each_method(tiny_model: Path):
    suffix = engine_arguments(tiny_model)["speculative_config"]
    assert suffix["method"] == "custom_class"
    module, _, name = suffix["model"].rpartition(".")
    assert (module, name) == (SuffixDrafter.__module__, SuffixDrafter.__name__)
    ngram = engine_arguments(tiny_model, method="ngram")["speculative_config"]
    assert ngram["model"] == f"{module}.{NgramDrafter.__name__}"
    for limit, table in (
        (0, [(1, 64, 0)]),
        (8, [(1, 8, 2), (9, 64, 0)]),
        (100, [(1, 64, 2)]),
        (None, [(1, 32, 2), (33, 64, 0)]),
    ):
        mtp = engine_arguments(tiny_model, method="mtp", off_above=limit, tokens=2)["speculative_config"]
        assert mtp["num_speculative_tokens_per_batch_size"] == table
    draft = engine_arguments(tiny_model, method="draft_model", model=tiny_model)
    assert draft["speculative_config"]["model"] == str(tiny_model)
    alone = VllmSettings(max_num_seqs=64).engine_arguments(
        str(tiny_model), max_context=64, dtype="auto", seed=0, free_share=None
    )
    assert draft["kv_cache_memory_bytes"] == 2 * alone["kv_cache_memory_bytes"]
    assert "speculative_config" not in alone


def test_on_gpus_steps_overlap_unless_drafts_need_the_step_before(tiny_model: Path):
    suffix = engine_arguments(tiny_model, 1.0)
    ngram = engine_arguments(tiny_model, 1.0, method="ngram")
    assert not suffix["async_scheduling"] and ngram["async_scheduling"]
    assert ngram["speculative_config"]["method"] == "ngram_gpu"
