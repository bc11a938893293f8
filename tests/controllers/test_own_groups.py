"""Worker groups that a run adds to the groups of its graphs."""

import pytest
from toy import ToyActor, ToyReward, ToyRollout, centred, prompts, toy_grpo

from weft.controllers.own_groups import FUNCTIONS, RECORDER, group_of, own_groups
from weft.dataflow.errors import UserError
from weft.dataflow.graph import Graph, group
from weft.dataflow.tracing import graph


@graph
def without_functions(source, *, rollout, reward):  # pyright: ignore
    return reward.score(rollout.generate(source))


def handles(model: str | None = None) -> dict[str, object]:
    return {"rollout": group(ToyRollout, model=model), "reward": group(ToyReward)}


def owned(recorded: Graph, record_every: int) -> dict[str, object]:
    return {
        name: handle.config
        for name, handle in own_groups([recorded], recorded.handles, record_every).items()
    }


def test_functions_have_a_group_where_a_graph_has_any_and_samples_where_any_are_kept():
    plain = without_functions(prompts(2), **handles())
    assert owned(plain, 0) == {} and [*owned(plain, 3)] == [RECORDER]
    recorded = toy_grpo(prompts(2), actor=group(ToyActor), **handles())
    assert [*owned(recorded, 0)] == [FUNCTIONS] and [*owned(recorded, 1)] == [FUNCTIONS, RECORDER]
    groups = {node.name: group_of(node) for node in recorded.nodes}
    assert groups[centred.__name__] == FUNCTIONS and groups["reward.score"] == "reward"


def test_the_recorder_decodes_with_the_tokenizer_of_a_model_of_the_run():
    config = own_groups([], without_functions(prompts(2), **handles("folder")).handles, 1)[
        RECORDER
    ].config
    assert config.tokenizer == "folder"


def test_a_group_of_the_user_cannot_have_the_name_of_one_of_them():
    taken = without_functions(
        prompts(2), rollout=group(ToyRollout, name=FUNCTIONS), reward=group(ToyReward)
    )
    with pytest.raises(
        UserError,
        match="worker group 'functions' has the name of Weft's group that runs the functions of graphs",
    ):
        own_groups([taken], taken.handles, 1)
