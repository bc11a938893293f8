"""The graph is general: many algorithms are recorded, printed, drawn and validated without a
run."""

import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from weft.algorithms import preference
from weft.algorithms.advantages import group_advantages, group_normalized, leave_one_out
from weft.algorithms.evaluation import evaluate
from weft.algorithms.graders.math import Gsm8k, Math
from weft.algorithms.grpo import grpo
from weft.algorithms.policy_loss import PolicyLoss
from weft.algorithms.preference_loss import LogLikelihood, PreferenceLoss
from weft.dataflow.batch import Batch
from weft.dataflow.config import Config
from weft.dataflow.errors import GraphError, UserError
from weft.dataflow.graph import Graph, Handle, Node, ParameterEdge, group
from weft.dataflow.operation import GROUPS, Operation, Shape, TrainingBatch, node
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import _SymbolicRows, graph
from weft.workers.actor import ActorWorker
from weft.workers.dispatch import Dispatch
from weft.workers.reference import ReferenceWorker
from weft.workers.reward import RewardWorker
from weft.workers.rollout import RolloutWorker
from weft.workers.worker import Worker, remote

PROMPTS = TableSource("prompts", pa.table({"prompt_ids": [[1]], "answer": ["2"]}))
HELD_OUT = TableSource("held_out", pa.table({"prompt_ids": [[1]], "answer": ["2"]}))
PAIRS = TableSource("pairs", pa.table({"prompt_ids": [[1]], "chosen_ids": [[2]], "rejected_ids": [[3]]}))


# Worker classes that Weft does not provide: everything a user would write.


class ModelConfig(Config):
    model: str = "m"


class Critic(Worker):
    Config = ModelConfig

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("prompt_ids", "response_ids"), writes=("values",))
    def values(self, samples: Batch) -> Batch: ...

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=("prompt_ids", "response_ids", "values", "returns"),
        takes=TrainingBatch(),
    )
    def update(self, samples: Batch) -> None: ...


class RewardModel(Worker):
    Config = ModelConfig

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP, reads=("prompt_ids", "response_ids"), writes=lambda into: (into,)
    )
    def score(self, samples: Batch, *, into: str = "reward") -> Batch: ...


class PreferenceActor(ActorWorker):
    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=("prompt_ids", "chosen_ids", "rejected_ids"),
        writes=lambda into: (f"{into}_chosen", f"{into}_rejected"),
    )
    def pair_logprobs(self, pairs: Batch, *, into: str) -> Batch: ...

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=("prompt_ids", "chosen_ids", "rejected_ids", "reference_chosen", "reference_rejected"),
        takes=TrainingBatch(),
    )
    def update_pairs(self, pairs: Batch, *, beta: float = 0.1) -> None: ...


class PairReference(Worker):
    Config = ModelConfig

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=("prompt_ids", "chosen_ids", "rejected_ids"),
        writes=("reference_chosen", "reference_rejected"),
    )
    def logprobs(self, pairs: Batch) -> Batch: ...


# Algorithms


@node(reads=("values", "reward", "old_logprobs", "reference_logprobs"), writes=("advantages", "returns"))
def generalised_advantages(samples: Batch, *, discount: float = 1.0, decay: float = 0.95) -> Batch: ...


@node(shape=Shape.FILTER, takes=GROUPS, reads=("reward",))
def keep_informative(samples: Batch) -> Batch: ...


@node(
    shape=Shape.EXPAND,
    takes=GROUPS,
    reads=("prompt_ids", "response_ids", "reward"),
    writes=("chosen_ids", "rejected_ids"),
)
def make_pairs(samples: Batch) -> Batch: ...


@node(shape=Shape.GROUP, reads=("reward", "response_ids"), writes=("advantages",))
def centred(samples: Batch) -> Batch: ...


@graph
def ppo(
    prompts: Any, *, rollout: Any, reward_model: Any, reference: Any, critic: Any, actor: Any
) -> Any:
    samples = rollout.generate(prompts, n=4)
    scores = reward_model.score(samples)
    old = actor.logprobs(samples, into="old_logprobs")
    anchor = reference.logprobs(samples, into="reference_logprobs")
    values = critic.values(samples)
    samples = generalised_advantages(scores | old | anchor | values)
    return critic.update(samples), actor.update(samples)


@graph
def dpo(pairs: Any, *, actor: Any, reference: Any) -> Any:
    return actor.update_pairs(reference.logprobs(pairs), beta=0.2)


@graph
def online_dpo(prompts: Any, *, rollout: Any, reward: Any, actor: Any, reference: Any) -> Any:
    samples = reward.score(rollout.generate(prompts, n=4))
    return dpo(make_pairs(samples), actor=actor, reference=reference)


@graph
def dapo(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    samples = reward.score(rollout.generate(prompts, n=4))
    return actor.update(centred(keep_informative(samples)))


@graph
def many_rewards(prompts: Any, *, rollout: Any, rewards: Sequence[Any], actor: Any) -> Any:
    samples = rollout.generate(prompts, n=4)
    for number, reward in enumerate(rewards):
        samples = reward.score(samples, into=f"reward_{number}")
    return actor.update(
        centred(total(samples, columns=tuple(f"reward_{k}" for k in range(len(rewards)))))
    )


@node(reads=lambda columns: columns, writes=("reward",))
def total(samples: Batch, *, columns: tuple[str, ...]) -> Batch: ...


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def rollout(**settings: Any) -> RolloutWorker:
    return group(RolloutWorker, model="m", **settings)


def reward(function: Any = exact) -> RewardWorker:
    return group(RewardWorker, function=function, tokenizer="m")


def all_graphs() -> dict[str, Graph]:
    graphs: dict[str, Graph] = {}
    r, a = rollout(), group(ActorWorker, model="m")
    r.follows(a)
    graphs["grpo"] = grpo(PROMPTS, rollout=r, reward=reward(), actor=a)
    r, a = rollout(), group(ActorWorker, model="m")
    r.follows(a)
    models = {
        "critic": group(Critic),
        "reward_model": group(RewardModel),
        "reference": group(ReferenceWorker, model="m"),
    }
    graphs["ppo"] = ppo(PROMPTS, rollout=r, actor=a, **models)
    graphs["dpo"] = dpo(PAIRS, actor=group(PreferenceActor, model="m"), reference=group(PairReference))
    r, a = rollout(), group(PreferenceActor, model="m")
    r.follows(a)
    graphs["online_dpo"] = online_dpo(
        PROMPTS, rollout=r, reward=reward(), actor=a, reference=group(PairReference)
    )
    r, a = rollout(), group(ActorWorker, model="m")
    r.follows(a)
    graphs["dapo"] = dapo(PROMPTS, rollout=r, reward=reward(), actor=a)
    r, a, t = rollout(), group(ActorWorker, model="m"), group(ReferenceWorker, model="m")
    r.follows(a)
    t.follows(a, every=100)
    graphs["teacher"] = grpo(PROMPTS, rollout=r, reward=reward(), actor=a, reference=t)
    r, a = rollout(), group(ActorWorker, model="m")
    graphs["many_rewards"] = many_rewards(
        PROMPTS, rollout=r, rewards=[reward(), group(RewardModel)], actor=a
    )
    return graphs


GRAPHS = all_graphs()

NODE = re.compile(
    r"""^  \s*(?P<id>\w+)(\[\("[^"]+"\)\]|\["[^"]+"\]|\[\["[^"]+"\]\]|\{"[^"]+"\}|\[/"[^"]+"/\]|\(\["[^"]+"\]\))$"""
)
EDGE = re.compile(r"""^  (?P<start>\w+) (-- "[^"]+" )?--> (?P<end>\w+)$""")
PARAMETERS = re.compile(r"""^  (?P<start>\w+) -\. "weights, [^"]+" \.-> (?P<end>\w+)$""")


def drawn(text: str) -> tuple[dict[str, str], set[tuple[str, str]], set[tuple[str, str]]]:
    """Parse Mermaid text into (id -> label, edges, parameter edges); fail on any other line."""
    first, *lines = text.splitlines()
    assert first == "flowchart LR"
    labels: dict[str, str] = {}
    edges, parameters, depth = set(), set(), 0
    for line in lines:
        if match := NODE.match(line):
            assert match["id"] not in labels, line
            labels[match["id"]] = line.split('"')[1]
        elif match := EDGE.match(line):
            edges.add((labels[match["start"]], labels[match["end"]]))
        elif match := PARAMETERS.match(line):
            parameters.add((labels[match["start"]], labels[match["end"]]))
        elif re.match(r'^  subgraph "[^"]+"$', line):
            depth += 1
        else:
            assert line == "  end" and depth, f"no Mermaid: {line}"
            depth -= 1
    assert depth == 0
    return labels, edges, parameters


@pytest.mark.parametrize("name", GRAPHS)
def test_every_algorithm_is_valid_and_drawn_whole(name: str):
    recorded = GRAPHS[name].validate()
    labels, edges, parameters = drawn(recorded.mermaid())
    assert set(labels.values()) >= {recorded.source.name, *(n.name for n in recorded.nodes)}
    for n in recorded.nodes:
        assert {(before, n.name) for before in n.after} <= edges
        assert {(w or recorded.source.name, n.name) for w in n.writers.values()} <= edges
    for edge in recorded.follows:
        followers = {n.name for n in recorded.nodes if n.group == edge.follower}
        assert {end for _, end in parameters} >= followers


@pytest.mark.parametrize("name", GRAPHS)
def test_every_algorithm_prints_its_nodes_and_columns(name: str):
    text = str(GRAPHS[name])
    for n in GRAPHS[name].nodes:
        assert (
            "/".join((*n.path, n.name)) in text
            and ", ".join(n.reads) in text
            and ", ".join(n.writes) in text
        )
    for edge in GRAPHS[name].follows:
        assert f"{edge.follower} follows {edge.leader}, every" in text


def test_grpo_prints_like_this():
    assert str(GRAPHS["grpo"]).splitlines()[:4] == [
        "graph grpo",
        "  source prompts: prompt_ids, answer",
        "  1. rollout.generate  [expand; prompts -> rollout.generate; takes rows]",
        "       reads prompt_ids",
    ]
    assert str(GRAPHS["grpo"]).splitlines()[-1] == "  rollout follows actor, every update"


def test_the_branches_of_ppo_do_not_wait_for_each_other():
    recorded = GRAPHS["ppo"]
    for name in ("reward_model.score", "actor.logprobs", "reference.logprobs", "critic.values"):
        assert recorded[name].after == ("rollout.generate",)
    joined = recorded["generalised_advantages"]
    assert set(joined.after) == {
        "rollout.generate",
        "reward_model.score",
        "actor.logprobs",
        "reference.logprobs",
        "critic.values",
    }
    assert [n.name for n in recorded.nodes if n.operation.updates] == ["critic.update", "actor.update"]
    assert "critic.update" not in recorded["actor.update"].after, "the two updates are independent"
    assert "actor.logprobs" in recorded["actor.update"].after, (
        "old log-probabilities are those of the weights before"
    )


def test_offline_dpo_takes_pairs_from_the_source_itself():
    recorded = GRAPHS["dpo"]
    assert all(n.level == 0 for n in recorded.nodes)
    assert recorded["actor.update_pairs"].arguments == {"beta": 0.2}


def test_online_dpo_makes_pairs_of_whole_groups_in_a_nested_graph():
    recorded = GRAPHS["online_dpo"]
    assert recorded.levels == {0: "prompts", 1: "rollout.generate", 2: "make_pairs"}
    assert recorded["make_pairs"].operation.whole_groups and recorded["make_pairs"].level == 1
    assert recorded["reference.logprobs"].path == ("dpo",) and recorded["reference.logprobs"].level == 2
    assert recorded["actor.update_pairs"].writers["prompt_ids"] == "", (
        "a pair still knows the prompt of its sample"
    )
    assert 'subgraph "dpo"' in recorded.mermaid()


def test_nodes_after_a_filter_wait_for_it():
    recorded = GRAPHS["dapo"]
    assert "keep_informative" in recorded["centred"].after
    assert "keep_informative" in recorded["actor.update"].after


def test_a_teacher_follows_every_hundred_updates():
    assert GRAPHS["teacher"].follows == (
        ParameterEdge("rollout", "actor", 1),
        ParameterEdge("reference", "actor", 100),
    )
    assert "weights, every 100 updates" in GRAPHS["teacher"].mermaid()


def test_a_loop_over_rewards_names_their_groups_and_columns():
    recorded = GRAPHS["many_rewards"]
    assert [n.name for n in recorded.nodes][1:3] == ["rewards_0.score", "rewards_1.score"]
    assert recorded["total"].reads == ("reward_0", "reward_1")


def test_groups_given_as_keywords_or_in_a_dictionary_are_named_by_their_keys():
    @graph
    def both(prompts: Any, *, rollout: Any, table: dict[str, Any], **rewards: Any) -> Any:
        samples = rollout.generate(prompts)
        for name, one in {**rewards, **table}.items():
            samples = one.score(samples, into=name)
        return samples

    recorded = both(PROMPTS, rollout=rollout(), table={"model": group(RewardModel)}, rule=reward())
    assert [n.name for n in recorded.nodes] == ["rollout.generate", "rule.score", "model.score"]


def test_an_evaluation_shares_the_groups_of_training():
    r, a, score = rollout(), group(ActorWorker, model="m"), reward()
    r.follows(a)
    training = grpo(PROMPTS, rollout=r, reward=score, actor=a)
    evaluation = evaluate(HELD_OUT, rollout=r, reward=score)
    assert evaluation.handles["rollout"] is training.handles["rollout"]
    assert evaluation.source.name == "held_out"
    evaluation.validate(also=[training])
    with pytest.raises(
        GraphError, match="'rollout' follows 'actor', which no node updates; updated groups: none"
    ):
        evaluation.validate()
    labels, _, parameters = drawn(evaluation.mermaid())
    assert "actor" in labels.values() and parameters == {("actor", "rollout.generate")}


def test_a_follower_without_a_node_is_drawn_all_the_same():
    r, a, t = (
        rollout(),
        group(ActorWorker, model="m"),
        group(ReferenceWorker, model="m", name='my "old" teacher'),
    )
    r.follows(a)
    t.follows(a)

    @graph
    def with_teacher(prompts: Any, *, rollout: Any, actor: Any, teacher: Any) -> Any:
        return actor.logprobs(rollout.generate(prompts))

    _, _, parameters = drawn(with_teacher(PROMPTS, rollout=r, actor=a, teacher=t).mermaid())
    assert parameters == {("actor", "rollout.generate"), ("actor", "my #quot;old#quot; teacher")}


def test_the_turns_of_a_dialogue_write_the_same_columns_again():
    @node(shape=Shape.EXPAND, reads=("prompt_ids", "response_ids"), writes=("prompt_ids",))
    def next_turn(samples: Batch) -> Batch: ...

    @graph
    def dialogue(prompts: Any, *, rollout: Any, reward: Any) -> Any:
        first = rollout.generate(prompts, n=2)
        return reward.score(rollout.generate(next_turn(first), n=1))

    recorded = dialogue(PROMPTS, rollout=rollout(), reward=reward())
    assert [n.name for n in recorded.nodes] == [
        "rollout.generate",
        "next_turn",
        "rollout.generate_2",
        "reward.score",
    ]
    assert recorded["rollout.generate_2"].writers == {"prompt_ids": "next_turn"}
    shown = {"prompt_ids": "next_turn"}  # in the message about a failing reward
    assert recorded["reward.score"].writers == {
        "response_ids": "rollout.generate_2",
        "answer": "",
        **shown,
    }


OF_SAMPLES = {"routes", "response_logprobs", "response_versions"}
"""Columns that an update reads if samples have them, with at least one value per token."""


def test_pairs_made_of_samples_have_no_per_token_columns():
    @graph
    def made_anew(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
        return preference.dpo(
            make_pairs(reward.score(rollout.generate(prompts, n=4))), actor=actor, loss=loss
        )

    loss = PreferenceLoss(score=LogLikelihood())
    made = {"rollout": rollout(routes=True), "reward": reward(), "actor": group(ActorWorker, model="m")}
    read = {*made_anew(PROMPTS, **made)["actor.update"].reads}
    assert not read & OF_SAMPLES and {"response_ids", "preferred", "temperature"} <= read
    kept = {"rollout": rollout(routes=True), "reward": reward(), "actor": group(ActorWorker, model="m")}
    assert {*preference.online_dpo(PROMPTS, **kept, loss=loss)["actor.update"].reads} >= OF_SAMPLES


def test_a_column_of_the_tokens_of_other_rows_is_named_with_the_node_that_made_new_ones():
    def of_pairs(prompts: Any, rollout: Any, actor: Any) -> Any:
        samples = rollout.generate(prompts, n=4)
        loss = PolicyLoss(old="response_logprobs")
        return actor.update(centred_pairs(preference.pairs(made_of_samples(samples))), loss=loss)

    @node(
        shape=Shape.EXPAND, takes=GROUPS, reads=("response_ids",), writes=("chosen_ids", "rejected_ids")
    )
    def made_of_samples(samples: Batch) -> Batch: ...

    @node(reads=("preferred",), writes=("advantages",))
    def centred_pairs(rows: Batch) -> Batch: ...

    assert mistake(of_pairs, rollout=rollout(), actor=group(ActorWorker, model="m")) == (
        "node 'actor.update' reads column 'response_logprobs', which 'rollout.generate' writes for other tokens: 'pairs' makes rows "
        "with new tokens; let it write 'response_logprobs' as well, or read the column before it"
    )


# Names


def test_a_group_takes_the_name_of_its_parameter_unless_it_has_one():
    recorded = evaluate(HELD_OUT, rollout=rollout(name="sampler"), reward=reward())
    assert set(recorded.handles) == {"sampler", "reward"}


def test_hasattr_reflects_the_methods_of_a_worker():
    handle: Any = reward()
    assert isinstance(handle, Handle) and hasattr(handle, "score") and not hasattr(handle, "logprobs")
    assert getattr(handle, "logprobs", None) is None


# Mistakes


def mistake(function: Any, source: Any = PROMPTS, **handles: Any) -> str:
    with pytest.raises(UserError) as caught:
        graph(function)(source, **handles)
    return str(caught.value)


def test_an_unknown_column_names_node_column_and_the_nearest():
    def misspelt(response: str, anwser: str) -> float: ...

    text = mistake(
        lambda p, rollout, reward: reward.score(rollout.generate(p)),
        rollout=rollout(),
        reward=reward(misspelt),
    )
    assert (
        text == "node 'reward.score' reads column 'anwser', which no node writes; did you mean 'answer'?"
    )


def test_an_unknown_column_without_a_near_match_lists_all_columns():
    bare = TableSource("bare", pa.table({"x": [1]}))
    text = mistake(lambda p, rollout: rollout.generate(p), bare, rollout=rollout())
    assert text.startswith(
        "node 'rollout.generate' reads column 'prompt_ids', which no node writes; there are x, "
    )


def test_a_column_written_later_is_named_with_its_writer():
    def late(p: Any, rollout: Any, reward: Any, actor: Any) -> Any:
        samples = rollout.generate(p)
        actor.update(samples)
        return centred(reward.score(samples))

    text = mistake(late, rollout=rollout(), reward=reward(), actor=group(ActorWorker, model="m"))
    assert text == "node 'actor.update' reads column 'advantages', which only 'centred' writes, later"


def test_a_column_on_another_branch_is_named_with_the_way_out():
    def apart(p: Any, rollout: Any, reward: Any) -> Any:
        samples = rollout.generate(p)
        reward.score(samples)
        return centred(samples)

    text = mistake(apart, rollout=rollout(), reward=reward())
    assert (
        text
        == "node 'centred' reads column 'reward', which 'reward.score' writes on another branch; pass its result, or join the two with |"
    )


def test_a_column_written_twice_is_refused():
    def twice(p: Any, rollout: Any, reward: Any) -> Any:
        return reward.score(reward.score(rollout.generate(p)))

    text = mistake(twice, rollout=rollout(), reward=reward())
    assert (
        text
        == "node 'reward.score_2' writes column 'reward', which node 'reward.score' writes already; rename it (into=...)"
    )


def test_a_node_that_reads_its_own_column_is_refused():
    @node(reads=("x",), writes=("x",))
    def again(rows: Batch) -> Batch: ...

    assert mistake(lambda p: again(p)) == "node 'again' reads column 'x', which it writes itself"


def test_identity_columns_belong_to_the_buffer():
    @node(writes=("group_id",))
    def regroup(rows: Batch) -> Batch: ...

    assert "writes column 'group_id', which identifies rows and belongs to the buffer" in mistake(
        lambda p: regroup(p)
    )


def test_rows_of_a_source_are_no_groups():
    rewarded = TableSource("rewarded", pa.table({"reward": [1.0], "response_ids": [[1]]}))
    text = mistake(lambda p: centred(p), rewarded)
    assert text.startswith(
        "node 'centred' sees complete groups, but each row of the source 'rewarded' is a separate group"
    )


def test_all_mistakes_are_reported_at_once():
    def several(p: Any, rollout: Any) -> Any:
        return keep_informative(centred(rollout.generate(p)))

    assert len(mistake(several, rollout=rollout()).splitlines()) == 2


def test_unknown_methods_and_arguments_are_answered_with_the_nearest():
    text = mistake(lambda p, rollout: rollout.genrate(p), rollout=rollout())
    assert text == "RolloutWorker has no node 'genrate'; did you mean 'generate'?"
    text = mistake(lambda p, reward: reward.logprobs(p), reward=reward())
    assert text == "RewardWorker has no node 'logprobs'; it has final_answers, score"
    text = mistake(lambda p, rollout: rollout.generate(p, smapling=None), rollout=rollout())
    assert (
        text
        == "RolloutWorker.generate takes no argument 'smapling' (value None); did you mean 'sampling'?"
    )


def test_arguments_of_the_graph_itself_are_checked_too():
    with pytest.raises(UserError, match=r"grpo takes no argument 'rollot' .*; did you mean 'rollout'"):
        grpo(PROMPTS, rollot=rollout(), reward=reward(), actor=group(ActorWorker, model="m"))
    with pytest.raises(
        UserError, match="grpo: missing a required argument: 'actor'; it takes prompts, rollout"
    ):
        grpo(PROMPTS, rollout=rollout(), reward=reward())
    with pytest.raises(UserError, match="must take rows as its first parameter"):
        graph(lambda: None)


def test_a_missing_source_is_named():
    with pytest.raises(UserError, match="grpo: missing a required argument: 'prompts'"):
        grpo(rollout=rollout(), reward=reward(), actor=group(ActorWorker, model="m"))
    with pytest.raises(
        UserError, match=r"graph 'dpo' takes a source of rows first \(weft\.Prompts.*not <handle"
    ):
        dpo(
            group(PairReference), actor=group(PreferenceActor, model="m"), reference=group(PairReference)
        )
    with pytest.raises(UserError, match=r"not 'prompts\.parquet'"):
        dpo("prompts.parquet", actor=group(PreferenceActor, model="m"), reference=group(PairReference))


def test_nothing_in_a_graph_depends_on_values():
    assert "cannot branch on rows" in mistake(
        lambda p, rollout: p and rollout.generate(p), rollout=rollout()
    )
    assert "cannot loop over rows" in mistake(list)
    with pytest.raises(
        UserError, match=r"RewardWorker>\.score\(\) takes the symbolic rows of a graph first"
    ):
        reward().score(Batch.of(x=[1]))


def test_a_join_needs_the_same_rows():
    assert "| joins two branches over the same rows" in mistake(
        lambda p, rollout: p | rollout.generate(p), rollout=rollout()
    )


def test_two_groups_cannot_share_a_name():
    text = mistake(
        lambda p, rollout, reward: reward.score(rollout.generate(p)),
        rollout=rollout(name="x"),
        reward=group(RewardModel, name="x"),
    )
    assert (
        text
        == "two worker groups are called 'x': give one of them another name with weft.group(..., name=...)"
    )


# Parameter edges


def test_follows_is_checked_when_it_is_called():
    a, r = group(ActorWorker, model="m"), rollout()
    for every in (0, -1, 1.5):
        with pytest.raises(UserError, match=f"every={every}.: every must be an integer of at least 1"):
            r.follows(a, every=every)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="takes a handle, not 'actor'"):
        r.follows("actor")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="RewardWorker has no receive_weights"):
        reward().follows(a)
    with pytest.raises(UserError, match="RolloutWorker has no publish_weights"):
        group(ReferenceWorker, model="m").follows(r)
    b = group(ActorWorker, model="m", name="b")
    with pytest.raises(UserError, match=r"follows\(\) takes a handle, not None"):
        r.follows()
    with pytest.raises(UserError, match=r"names <handle b: ActorWorker> twice; name each leader once"):
        r.follows(b, b)
    r.follows(a)
    with pytest.raises(UserError, match=r"already; name all leaders in one call of follows\(\)"):
        r.follows(b)
    r.follows(a)
    assert r.leaders == (a,)  # pyright: ignore[reportAttributeAccessIssue]


def policies_of(*actors: str) -> Any:
    """Return a graph with one rollout that samples with the adapters of these actors."""
    made = [group(ActorWorker, model="m", name=name) for name in actors]
    r = rollout()
    r.follows(*made)

    @graph
    def several(prompts, *, rollout, reward):
        for actor in made:
            samples = reward.score(rollout.generate(prompts, policy=actor))
            actor.update(group_advantages(samples), loss=PolicyLoss())

    return several(PROMPTS, rollout=r, reward=reward())


def test_branches_of_several_policies_may_write_the_same_columns():
    made = policies_of("a", "b")
    assert [(n.name, n.policy, n.level) for n in made.nodes if n.makes_level] == [
        ("rollout.generate", "a", 0),
        ("rollout.generate_2", "b", 0),
    ]
    assert made["b.update"].writers["advantages"] == "group_advantages_2"
    assert made["rollout.generate"].uses == (), "the actor does not work for the node"
    assert [(e.follower, e.leader) for e in made.follows] == [("rollout", "a"), ("rollout", "b")]
    assert made["rollout.generate"].writes[-1] == "policy"
    made.validate()
    drawn = made.mermaid()
    ids = {n.name: f"n{i}" for i, n in enumerate(made.nodes)}
    own = f'{ids["b.update"]} -. "weights, every update" .-> {ids["rollout.generate_2"]}'
    other = f'{ids["b.update"]} -. "weights, every update" .-> {ids["rollout.generate"]}'
    assert own in drawn.splitlines()[-1] and other not in {line.strip() for line in drawn.splitlines()}


def test_following_a_group_without_updates_is_refused():
    r, a = rollout(), group(ActorWorker, model="m", name="frozen")
    r.follows(a)
    with pytest.raises(
        GraphError, match="'rollout' follows 'frozen', which no node updates; updated groups: none"
    ):
        evaluate(HELD_OUT, rollout=r, reward=reward()).validate()


class Both(ActorWorker):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: Any) -> str: ...


def test_worker_groups_must_not_follow_each_other():
    a, b = group(Both, model="m"), group(Both, model="m")
    a.follows(b)
    b.follows(a)

    @graph
    def circle(pairs: Any, *, first: Any, second: Any) -> Any:
        return second.logprobs(first.logprobs(pairs), into="again")

    source = TableSource("s", pa.table({"prompt_ids": [[1]], "response_ids": [[1]]}))
    with pytest.raises(
        GraphError, match="worker groups follow each other's weights: first -> second -> first"
    ):
        circle(source, first=a, second=b)


def test_a_chain_of_followers_is_fine():
    a, b, r = group(Both, model="m"), group(Both, model="m", name="middle"), rollout()
    r.follows(b)
    b.follows(a, every=2)
    recorded = grpo(PROMPTS, rollout=r, reward=reward(), actor=a).validate()
    assert set(recorded.follows) == {
        ParameterEdge("rollout", "middle", 1),
        ParameterEdge("middle", "actor", 2),
    }


def hand_made(name: str, after: tuple[str, ...]) -> Node:
    return Node(name, None, Operation(name), print, {}, (), (), (), 0, None, {}, after)


def test_a_hand_made_graph_with_a_cycle_is_refused():
    nodes = (hand_made("a", ("c",)), hand_made("b", ("a",)), hand_made("c", ("b",)))
    with pytest.raises(GraphError, match="nodes wait for each other: a -> c -> b -> a"):
        Graph("round", PROMPTS, nodes).validate()


def test_an_unknown_node_is_answered_with_the_nearest():
    with pytest.raises(
        KeyError, match=r"graph 'grpo' has no node 'actor\.updat'; did you mean 'actor.update'"
    ):
        GRAPHS["grpo"]["actor.updat"]


def test_rows_know_their_columns():
    seen: list[tuple[str, ...]] = []

    @graph
    def look(prompts: _SymbolicRows) -> None:
        seen.append(prompts.columns)

    look(PROMPTS)
    assert seen == [("prompt_ids", "answer")]


def test_graphs_are_made_without_torch_or_ray():
    loaded = "print(*{'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules))"
    code = f"import runpy, sys; runpy.run_path({__file__!r})['all_graphs'](); {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("called", "message"),
    [
        (
            leave_one_out,
            "'leave_one_out' is not a node; an estimator is part of a node: group_advantages",
        ),
        (
            group_normalized,
            "'group_normalized' is not a node; an estimator is part of a node: group_advantages",
        ),
        (PolicyLoss(), "'PolicyLoss' is not a node; a loss is part of an update: actor.update"),
        (PreferenceLoss(), "'PreferenceLoss' is not a node; a loss is part of an update: actor.update"),
        (Math(), "'Math' is not a node; a grader is part of a reward worker: weft.group"),
        (Gsm8k(), "'Gsm8k' is not a node; a grader is part of a reward worker: weft.group"),
        (
            lambda rows: rows["reward"],
            "graph 'wrong' reads 'reward', but rows have no values while a graph is traced",
        ),
        (lambda rows: rows.reward, "graph 'wrong' reads 'reward', but rows have no values"),
        (len, "graph 'wrong' asks for the number of rows, but rows have no values"),
    ],
)
def test_a_part_of_a_node_that_is_called_as_one_names_its_node(called: Any, message: str):
    @graph
    def wrong(rows: Any) -> None:
        called(rows)

    with pytest.raises(UserError, match=re.escape(message)):
        wrong(TableSource("source", pa.table({"prompt_ids": [[1, 2]]})))
