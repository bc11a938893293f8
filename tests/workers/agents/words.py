"""A renderer whose tokens are words, for tests of sessions and the gateway."""

from __future__ import annotations

from collections.abc import Sequence

from weft.workers.agents.messages import Conversation, Message


class WordRenderer:
    """Renders a message as its role, its words and `<end>`. Earlier assistant turns lose the word
    `think`, as templates strip earlier thinking."""

    def __init__(self) -> None:
        self.words = ["<end>", "<system>", "<user>", "<assistant>", "<tool>"]
        self.renders = 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (0,)

    def ids(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def render(self, conversation: Conversation) -> list[int]:
        self.renders += 1
        texts = [self._text(m, strips=True) for m in conversation.messages]
        return self.ids(" ".join([*texts, "<assistant>"]))

    def tail(self, conversation: Conversation, known: int, last_id: int | None) -> list[int]:
        closing = [] if last_id == 0 else [0]
        texts = [self._text(m, strips=False) for m in conversation.messages[known:]]
        return closing + self.ids(" ".join([*texts, "<assistant>"]))

    def parse(self, token_ids: Sequence[int], conversation: Conversation) -> Message:
        return Message("assistant", self.decode([i for i in token_ids if i]))

    def has_more(self, texts: Sequence[str], tokens: int) -> bool:
        return sum(len(text.split()) for text in texts) > tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.words[i] for i in token_ids)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self.words[i] for i in token_ids]

    def _text(self, message: Message, *, strips: bool) -> str:
        content = message.content
        if strips and message.role == "assistant":
            content = content.replace("think", "")
        return f"<{message.role}> {content} <end>"
