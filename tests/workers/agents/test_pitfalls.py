"""Bugs that users of other systems reported in the training of agents, each with a test here or in the file of
its subject. The mark `pitfall(n)` names the bug that a test would find."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from chat_families import family_folder

from weft.workers.agents.messages import Conversation, Message, TurnRequest
from weft.workers.agents.rendering import Renderer
from weft.workers.agents.sessions import Session, SessionRow
from weft.workers.generation.engine import Response

TESTS = Path(__file__).parents[2]

PITFALLS = {
    1: "The template leaves out earlier thinking, so the next prompt does not begin with the row.",
    2: "Sampled tokens are decoded and encoded again, which gives other tokens.",
    3: "A history becomes shorter, and its mask stays as long as it was.",
    4: "A conversation is found again by its last two turns only.",
    5: "Tool calls in the history reach the template without their arguments, or not at all.",
    6: "Spans of turns come from renders of prefixes, but the stop token is only after the last turn.",
    7: "Special tokens are missing in the text, but not in the ids, so the mask is beside its tokens.",
    8: "Requests of sub-agents lie between those of the main agent, and each turn becomes a row.",
    9: "A changed history makes several rows, and only the last one is trained.",
    10: "Penalties of a tool's tokens are summed into returns, or the buffer loses the mask.",
    11: "An episode that was cut off counts as finished, because a pipe hides the exit code.",
    12: "A missing reward file, or an exception while grading, counts as reward 0.",
    13: "A result of None shall discard the episode, and does not.",
    14: "Masked rows count in the mean and standard deviation of their group.",
    15: "A new attempt has a new key, and the rows are awaited from the session of the old one.",
}


def test_each_pitfall_has_a_test():
    folders = ("workers/agents", "algorithms", "controllers")
    files = [file for folder in folders for file in (TESTS / folder).glob("test_*.py")]
    marked = re.findall(r"@pytest\.mark\.pitfall\((\d+)\)\n", "".join(map(Path.read_text, files)))
    assert {int(number) for number in marked} == {*PITFALLS}


class Talk:
    """A session of a Qwen3."""

    def __init__(self, folder: Path) -> None:
        self.renderer = Renderer.load(family_folder(folder / "m", "qwen3"))
        self.session = Session(self.renderer, 10_000, most_rows=1000)

    def ids(self, text: str) -> list[int]:
        return self.renderer.tokenizer.encode([text], add_special_tokens=False)[0].tolist()

    def say(self, messages: Sequence[Message], ids: Sequence[int]) -> tuple[list[int], list[Message]]:
        """Sample a turn. Return its prompt, and the conversation with its message as a client
        returns it."""
        (turn,) = self.session.begin(TurnRequest(Conversation(tuple(messages))))
        number = len(ids)
        logprobs, versions = np.full(number, -1, np.float32), np.zeros(number, np.int32)
        reply = self.session.end(
            turn, Response(0, 0, np.array(ids, np.int32), logprobs, versions, "stop")
        )
        return turn.prompt_ids().tolist(), [*messages, Message("assistant", reply.content)]


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return Talk(tmp_path)


def trained(row: SessionRow) -> list[int]:
    assert len(row.response_ids) == len(row.mask) == len(row.logprobs) == len(row.versions)
    return row.response_ids[row.mask == 1].tolist()


FIRST, MORE = Message("user", "What is 1 + 2?"), Message("user", "Sure?")


@pytest.mark.pitfall(2)
def test_tokens_that_no_tokenizer_makes_stay_as_they_are(talk: Talk):
    stop = talk.renderer.stop_token_ids[0]
    odd = [*(each for letter in "The weather" for each in talk.ids(letter)), stop]
    assert talk.ids(talk.renderer.decode(odd)) != odd
    prompt, so_far = talk.say([FIRST], odd)
    longer, _ = talk.say([*so_far, MORE], [stop])
    assert longer[: len(prompt + odd)] == prompt + odd
    (row,) = talk.session.rows()
    assert trained(row) == [*odd, stop] and talk.session.retokenised == 0


@pytest.mark.pitfall(3)
def test_a_conversation_that_shrinks_has_masks_as_long_as_its_rows(talk: Talk):
    stop = talk.renderer.stop_token_ids[0]
    said = [[*talk.ids(text), stop] for text in ("It is blue and 20 degrees.", "Yes.", "No.")]
    _, so_far = talk.say([FIRST], said[0])
    talk.say([*so_far, MORE], said[1])
    short = [Message("user", "Hello"), so_far[-1], MORE]
    prompt, _ = talk.say(short, said[2])
    first, second = talk.session.rows()
    assert (trained(first), trained(second)) == ([*said[0], *said[1]], said[2])
    assert second.prompt_ids.tolist() == prompt == talk.renderer.render(Conversation(tuple(short)))


@pytest.mark.pitfall(7)
def test_special_tokens_in_a_turn_keep_their_places(talk: Talk):
    start, stop = talk.ids("<|im_start|>")[0], talk.renderer.stop_token_ids[0]
    said = [start, *talk.ids("It is"), start, *talk.ids(" blue."), stop]
    prompt, so_far = talk.say([FIRST], said)
    assert so_far[-1].content == "It is blue."
    longer, _ = talk.say([*so_far, MORE], said)
    (row,) = talk.session.rows()
    assert [*row.prompt_ids, *row.response_ids] == [*longer, *said] and longer[: len(prompt)] == prompt
    assert trained(row) == said * 2
