"""Sessions keep the exact tokens of an episode, whatever its conversation does."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
import pytest

from weft.workers.agents.failures import ContextFull
from weft.workers.agents.messages import Conversation, Message, ToolCall, TurnRequest
from weft.workers.agents.sessions import Session, SessionRow, Turn
from weft.workers.generation.engine import Response

from .words import WordRenderer


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


class Talk:
    """A session and its renderer. `say` samples a turn with the given words."""

    def __init__(self, max_context: int = 10_000) -> None:
        self.renderer = WordRenderer()
        self.session = Session(self.renderer, max_context, most_rows=1000)  # pyright: ignore[reportArgumentType]
        self.version = 0

    def begin(self, messages: list[Message], **options: object) -> list[Turn]:
        retry = bool(options.pop("retry", False))
        request = TurnRequest(Conversation(tuple(messages)), **options)  # pyright: ignore[reportArgumentType]
        return self.session.begin(request, retry=retry)

    def end(
        self,
        turn: Turn,
        text: str,
        *,
        stop: bool = True,
        reason: Literal["stop", "length"] | None = None,
    ) -> Message:
        ids = self.renderer.ids(text) + [0] * stop
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        versions = np.full(len(ids), self.version, np.int32)
        reason = reason or ("stop" if stop else "length")
        response = Response(0, 0, np.array(ids, np.int32), logprobs, versions, reason)
        return self.session.end(turn, response)

    def say(self, messages: list[Message], text: str, *, stop: bool = True) -> list[Message]:
        (turn,) = self.begin(messages)
        return [*messages, self.end(turn, text, stop=stop)]

    def texts(self) -> list[tuple[str, str]]:
        """Return each row's prompt and response; given tokens are in brackets."""
        return [self.text(row) for row in self.session.rows()]

    def text(self, row: SessionRow) -> tuple[str, str]:
        pairs = zip(row.response_ids.tolist(), row.mask.tolist(), strict=True)
        words = [self.renderer.words[i] if own else f"[{self.renderer.words[i]}]" for i, own in pairs]
        return self.renderer.decode(row.prompt_ids.tolist()), " ".join(words)


def test_a_conversation_of_two_turns_is_one_row():
    talk = Talk()
    so_far = talk.say([user("add 2 3")], "call add")
    talk.version = 1
    talk.say([*so_far, Message("tool", "5")], "it is 5")
    (row,) = talk.session.rows()
    assert talk.text(row) == (
        "<user> add 2 3 <end> <assistant>",
        "call add <end> [<tool>] [5] [<end>] [<assistant>] it is 5 <end>",
    )
    assert row.mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert row.logprobs.tolist() == [-1, -2, -3, 0, 0, 0, 0, -1, -2, -3, -4]
    assert row.versions.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert row.turn_ends.tolist() == [3, 11]
    assert (row.finish_reason, talk.session.retokenised, talk.session.num_turns) == ("stop", 0, 2)


def test_a_turn_without_a_stop_token_is_closed_by_given_tokens():
    talk = Talk()
    so_far = talk.say([user("count")], "1 2 3", stop=False)
    talk.say([*so_far, user("go on")], "4")
    assert talk.texts()[0][1] == "1 2 3 [<end>] [<user>] [go] [on] [<end>] [<assistant>] 4 <end>"


@pytest.mark.pitfall(1)
def test_a_template_that_strips_earlier_thinking_changes_no_token():
    talk = Talk()
    so_far = talk.say([user("a")], "think b")
    talk.say([*so_far, user("c")], "think d")
    assert talk.texts() == [
        (
            "<user> a <end> <assistant>",
            "think b <end> [<user>] [c] [<end>] [<assistant>] think d <end>",
        )
    ]
    assert talk.session.retokenised == 0


@pytest.mark.pitfall(8)
def test_a_sub_agent_has_its_own_row_and_does_not_count_as_retokenised():
    talk = Talk()
    main = talk.say([user("plan")], "ask helper")
    helper = talk.say([Message("system", "you help"), user("task")], "done")
    main = talk.say([*main, Message("tool", "done")], "thanks")
    talk.say([*helper, user("more")], "again")
    assert [response for _, response in talk.texts()] == [
        "ask helper <end> [<tool>] [done] [<end>] [<assistant>] thanks <end>",
        "done <end> [<user>] [more] [<end>] [<assistant>] again <end>",
    ]
    assert talk.session.retokenised == 0


def test_branches_train_their_common_turn_once():
    talk = Talk()
    so_far = talk.say([user("a")], "b")
    talk.say([*so_far, user("c")], "d")
    talk.say([*so_far, user("e")], "f")
    assert [response for _, response in talk.texts()] == [
        "b <end> [<user>] [c] [<end>] [<assistant>] d <end>",
        "[b] [<end>] [<user>] [e] [<end>] [<assistant>] f <end>",
    ]
    assert [row.turn_ends.tolist() for row in talk.session.rows()] == [[2, 8], [8]]


@pytest.mark.pitfall(9)
def test_a_changed_history_starts_a_row_and_is_counted():
    talk = Talk()
    so_far = talk.say([user("a")], "b")
    so_far = talk.say([*so_far, user("c")], "d")
    compacted = [user("summary"), so_far[-1], user("e")]
    talk.say(compacted, "f")
    assert [response for _, response in talk.texts()] == [
        "b <end> [<user>] [c] [<end>] [<assistant>] d <end>",
        "f <end>",
    ]
    assert talk.session.retokenised == 1


def test_examples_that_the_model_did_not_sample_do_not_count_as_retokenised():
    talk = Talk()
    talk.say([user("x"), said("y"), user("a")], "b")
    assert talk.session.retokenised == 0


def test_messages_match_without_ids_of_calls_and_with_arguments_as_objects():
    talk = Talk()
    (turn,) = talk.begin([user("a")])
    talk.end(turn, "call")
    sampled = Message("assistant", "", (ToolCall("f", {"x": 1, "y": [2]}, "id-1"),))
    turn.message = sampled
    # What a client returns: another id, another order of keys, white space.
    echoed = Message("assistant", " ", (ToolCall("f", {"y": [2], "x": 1}, "call_9"),), reasoning="hm")

    assert sampled.identity == echoed.identity
    other = Message("assistant", "", (ToolCall("f", {"x": 2, "y": [2]}),))
    assert sampled.identity != other.identity


@pytest.mark.pitfall(4)
def test_conversations_that_differ_only_at_their_beginning_are_told_apart():
    talk = Talk()
    talks = {start: [user(start)] for start in ("x", "y")}
    for reply in ("a", "b", "c", "d"):
        talks = {k: [*talk.say(each, reply), user(f"after {reply}")] for k, each in talks.items()}
    for start in ("y", "x"):
        talk.say(talks[start], f"last of {start}")
    for prompt, response in talk.texts():
        assert prompt.split()[1] == response.split()[-2]
    assert len(talk.session.rows()) == 2 and talk.session.retokenised == 0


@pytest.mark.pitfall(4)
def test_a_history_is_found_again_however_many_messages_follow():
    talk = Talk()
    so_far = talk.say([user("a")], "b")
    others = [message for k in range(5) for message in (user(f"u{k}"), said(f"a{k}"))]
    talk.say([*so_far, *others, user("last")], "c")
    (row,) = talk.session.rows()
    assert row.mask.sum() == 4 and talk.session.retokenised == 0


@pytest.mark.pitfall(4)
def test_a_conversation_of_ten_turns_is_found_again_from_any_turn():
    talk = Talk()
    so_far: list[Message] = []
    states: list[list[Message]] = []
    for number in range(10):
        so_far = talk.say([*so_far, user(f"u{number}")], f"a{number}")
        states.append(so_far)
    for number, state in enumerate(states[:-1]):
        talk.say([*state, user("other")], f"b{number}")
    rows = talk.session.rows()
    assert len(rows) == 10
    assert sum(int(row.mask.sum()) for row in rows) == 2 * (10 + 9)
    assert talk.session.retokenised == 0


def test_a_repeated_request_is_not_a_second_turn():
    talk = Talk()
    (turn,) = talk.begin([user("a")])
    assert talk.begin([user("a")], retry=True) == [turn]
    talk.end(turn, "b")
    assert talk.begin([user("a")], retry=True) == [turn]
    assert len(talk.session.rows()) == 1


def test_a_request_whose_client_hung_up_is_joined_by_its_repetition():
    talk = Talk()
    (turn,) = talk.begin([user("a")])
    turn.abandoned = True
    assert talk.begin([user("a")]) == [turn]
    assert not turn.abandoned


def test_a_request_whose_choices_were_partly_aborted_is_sampled_again():
    talk = Talk()
    first, second = talk.begin([user("Q")], n=2)
    talk.end(first, "A")
    first.abandoned = second.abandoned = True
    talk.session.drop(second)
    again = talk.begin([user("Q")], n=2)
    assert len(again) == 2 and first not in again


def test_equal_requests_at_the_same_time_are_two_samples():
    talk = Talk()
    first, second = talk.begin([user("a")])[0], talk.begin([user("a")])[0]
    assert first is not second
    assert (first.number, second.number) == (0, 1)
    talk.end(second, "c")
    talk.end(first, "b")
    assert [response for _, response in talk.texts()] == ["b <end>", "c <end>"]


def test_equal_replies_continue_in_different_turns():
    talk = Talk()
    turns = talk.begin([user("a")], n=2)
    for turn in turns:
        talk.end(turn, "b")
    so_far = [user("a"), said("b")]
    talk.say([*so_far, user("c")], "d")
    talk.say([*so_far, user("e")], "f")
    assert [row.mask.sum() for row in talk.session.rows()] == [4, 4]


def test_a_turn_that_nobody_received_has_no_row():
    talk = Talk()
    (turn,) = talk.begin([user("a")])
    talk.end(turn, "b")
    turn.abandoned = True
    assert talk.session.rows() == []


def test_a_turn_that_was_dropped_has_no_row():
    talk = Talk()
    so_far = talk.say([user("a")], "b")
    (turn,) = talk.begin([*so_far, user("c")])
    talk.session.drop(turn)
    assert len(talk.session.rows()) == 1
    assert talk.session.rows()[0].response_ids.tolist() == [*talk.renderer.ids("b"), 0]


def test_a_full_context_is_refused_with_its_numbers():
    talk = Talk(max_context=6)
    with pytest.raises(ContextFull, match="7 tokens, and the context of the model has 6"):
        talk.begin([user("a b c d")])
    (turn,) = talk.begin([user("a")])
    assert talk.session.room(turn, 100) == 2


def test_limits_of_a_client_count_if_they_are_smaller():
    talk = Talk(max_context=100)
    (turn,) = talk.begin([user("a")], max_tokens=5)
    assert (talk.session.room(turn, 50), talk.session.room(turn, 3)) == (5, 3)


def test_token_requests_are_matched_by_their_ids():
    talk = Talk()
    session = talk.session
    (turn,) = session.begin_tokens([5, 6, 7])
    session.end_tokens(turn, _response([8, 0]))
    (second,) = session.begin_tokens([5, 6, 7, 8, 0, 9])
    assert second.parent is turn and second.given.tolist() == [9]
    session.end_tokens(second, _response([4]))
    (row,) = session.rows()
    assert (row.prompt_ids.tolist(), row.response_ids.tolist()) == ([5, 6, 7], [8, 0, 9, 4])
    assert row.mask.tolist() == [1, 1, 0, 1]
    # The same text, tokenised differently: another row, and counted.
    session.end_tokens(session.begin_tokens([5, 6, 7, 80, 9])[0], _response([3]))
    assert (len(session.rows()), session.retokenised) == (2, 1)


def _response(ids: list[int]) -> Response:
    number = len(ids)
    zeros = np.zeros(number, np.float32)
    return Response(0, 0, np.array(ids, np.int32), zeros, np.zeros(number, np.int32), "stop")


@pytest.mark.parametrize("seed", range(20))
def test_every_sampled_token_of_random_conversations_is_trained_once(seed: int):
    draw = random.Random(seed)
    talk = Talk()
    sampled: list[int] = []
    states: list[list[Message]] = [[user("start")]]
    for number in range(40):
        state = draw.choice(states)
        if state[-1].role == "assistant":
            state = [*state, draw.choice([user, lambda t: Message("tool", t)])(f"w{number}")]
        if draw.random() < 0.1:
            state = [Message("system", f"s{number}"), *state[-1:]]
        words = " ".join(f"t{number}-{k}" for k in range(draw.randint(1, 4)))
        (turn,) = talk.begin(state)
        before = turn.prompt_ids().tolist()
        stop = draw.random() < 0.8
        reply = talk.end(turn, words, stop=stop)
        assert turn.response is not None
        sampled += turn.response.token_ids.tolist()
        states.append([*state, reply])
        # The prompt is the parent's exact ids and what came after them.
        if turn.parent is not None and turn.parent.response is not None:
            known = [*turn.parent.prompt_ids().tolist(), *turn.parent.response.token_ids.tolist()]
            assert before[: len(known)] == known
    rows = talk.session.rows()
    trained = [i for row in rows for i in row.response_ids[row.mask == 1].tolist()]
    assert sorted(trained) == sorted(sampled)
    assert sum(len(row.turn_ends) for row in rows) == 40
    for row in rows:
        assert len(row.response_ids) == len(row.mask) == len(row.logprobs) == len(row.versions)
        assert row.mask[row.turn_ends - 1].all()


def test_a_repeated_request_gets_as_many_turns_as_it_asks_for():
    talk = Talk()
    first, second = talk.begin([user("a")])[0], talk.begin([user("a")])[0]
    assert talk.begin([user("a")], retry=True) == [second]
    first.abandoned = True
    assert talk.begin([user("a")]) == [first]


def test_an_assistants_name_and_the_form_of_a_number_are_no_other_history():
    talk = Talk()
    (turn,) = talk.begin([user("a")])
    reply = talk.end(turn, "b")
    talk.say([user("a"), Message("assistant", reply.content, name="coder"), user("c")], "d")
    assert (len(talk.session.rows()), talk.session.retokenised) == (1, 0)
    whole, fraction = (Message("assistant", "", (ToolCall("f", {"x": x}),)) for x in (1, 1.0))
    assert whole.identity == fraction.identity


def test_a_row_knows_which_of_the_episodes_turns_are_its_own():
    talk = Talk()
    main = talk.say([user("plan")], "ask helper")
    talk.say([Message("system", "you help"), user("task")], "done")
    main = talk.say([*main, Message("tool", "done")], "thanks")
    (lost,) = talk.begin([user("nobody waits for this")])
    talk.end(lost, "c")
    lost.abandoned = True
    talk.say([*main, user("more")], "more")
    assert [row.turns.tolist() for row in talk.session.rows()] == [[1], [0, 2, 3]]


def test_a_stop_string_is_in_the_row_and_not_in_the_message():
    talk = Talk()
    (turn,) = talk.begin([user("a")], stop=("Observation:", "END"))
    reply = talk.end(turn, "look left Observation:", stop=False, reason="stop")
    assert (reply.content, turn.stop_string) == ("look left ", "Observation:")
    # The harness adds its own observation.
    talk.say([user("a"), said("look left"), user("Observation: a door")], "enter")
    (row,) = talk.session.rows()
    assert talk.text(row)[1].startswith("look left Observation: [<end>] [<user>] [Observation:] [a]")
    assert row.mask.tolist() == [1, 1, 1, *[0] * 7, 1, 1]


@pytest.mark.parametrize(("text", "stop", "reason"), [("END", True, "stop"), ("END", False, "length")])
def test_a_turn_that_ended_otherwise_keeps_its_whole_text(
    text: str, stop: bool, reason: Literal["stop", "length"]
):
    """For example, because it has fewer than `min_tokens`."""
    talk = Talk()
    (turn,) = talk.begin([user("a")], stop=("END",))
    assert (talk.end(turn, text, stop=stop, reason=reason).content, turn.stop_string) == ("END", "")


def test_a_sample_after_a_dropped_one_has_another_seed():
    talk = Talk()
    first, second = talk.begin([user("a")], n=2)
    talk.session.drop(first)
    (third,) = talk.begin([user("a")])
    assert second.number != third.number
