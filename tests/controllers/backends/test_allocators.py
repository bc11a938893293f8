"""Settings of torch's allocators on ranks with GPUs."""

from typing import Any

from weft.controllers.backends.rank import allocator_settings
from weft.dataflow.graph import group
from weft.workers.actor import ActorWorker
from weft.workers.rollout import RolloutWorker

PINNED = {"pinned_max_round_threshold_mb": "16", "pinned_max_cached_size_mb": "16"}


def options(handle: Any, **given: str) -> dict[str, str]:
    made = allocator_settings(handle, given)["PYTORCH_ALLOC_CONF"].split(",")
    return dict(option.split(":") for option in made)


def actor(**settings: Any) -> Any:
    return group(ActorWorker, model="m", **settings)


def test_trainers_expand_segments_unless_other_processes_map_their_memory():
    assert options(actor()) == {"expandable_segments": "True", **PINNED}
    assert options(group(RolloutWorker, model="m")) == PINNED
    for transport in ("ipc", "vllm:ipc"):
        assert options(actor(transport=transport)) == PINNED


def test_options_of_the_user_win():
    given = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,pinned_max_cached_size_mb:4"}
    assert options(actor(), **given) == {
        "pinned_max_round_threshold_mb": "16",
        "expandable_segments": "False",
        "pinned_max_cached_size_mb": "4",
    }
