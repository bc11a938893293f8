"""An engine on a shared GPU loads new weights before it allocates the KV cache."""

import pytest

from weft.workers.generation.vllm_engine import _SleepingEngine


class TaggedEngine:
    """Memory by tag, like vLLM's executor: allocate and free each tag in turn."""

    def __init__(self) -> None:
        self.there = {"weights", "kv_cache"}
        self.calls: list[str] = []

    def sleep(self, level: int) -> None:
        assert self.there == {"weights", "kv_cache"}, "vLLM would free memory twice"
        self.there.clear()
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        assert tags and not self.there & set(tags), "vLLM would claim memory twice"
        self.there |= set(tags)
        self.calls += tags
        return len(self.there) == 2


@pytest.fixture
def engine() -> TaggedEngine:
    return TaggedEngine()


def test_weights_come_before_memory_for_keys_and_values(engine: TaggedEngine):
    sleeping = _SleepingEngine(engine)
    sleeping.sleep(discard_weights=False)
    assert not sleeping.on_device and not engine.there
    sleeping.wake_weights()
    assert sleeping.on_device == engine.there == {"weights"}
    sleeping.wake()
    assert engine.calls == ["sleep 1", "weights", "kv_cache"]


def test_an_engine_that_got_weights_and_no_request_sleeps_again(engine: TaggedEngine):
    sleeping = _SleepingEngine(engine)
    sleeping.sleep(discard_weights=False)
    sleeping.wake_weights()
    sleeping.sleep(discard_weights=False)
    assert not sleeping.on_device and not engine.there


def test_repeated_sleep_and_wake_calls_change_nothing(engine: TaggedEngine):
    sleeping = _SleepingEngine(engine)
    sleeping.wake()
    sleeping.wake_weights()
    assert not engine.calls
    for _ in range(2):
        sleeping.sleep(discard_weights=False)
    for _ in range(2):
        sleeping.wake()
    assert engine.calls == ["sleep 1", "weights", "kv_cache"]


def test_weights_that_new_ones_replace_are_freed_without_a_copy(engine: TaggedEngine):
    _SleepingEngine(engine).sleep(discard_weights=True)
    assert engine.calls == ["sleep 2"]
