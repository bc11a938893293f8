"""Warnings of a run that cannot learn: once, with a remedy."""

import functools
import inspect
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from toy import ToyActor, ToyConfig, ToyLoss, ToyReward, ToyRollout, centred, prompts

import weft
from weft.algorithms.advantages import (
    Estimator,
    Outcomes,
    best_of_group,
    greedy_baseline,
    group_advantages,
    group_centred,
    group_normalized,
    leave_one_out,
    length_weighted,
    valid_groups_centred,
)
from weft.algorithms.corrections import TruncatedImportance
from weft.algorithms.graders.text import Exact
from weft.algorithms.grpo import drop_zero_variance, first_of_group
from weft.algorithms.policy_loss import NegativeLogLikelihood, PolicyLoss
from weft.algorithms.preference import best_and_worst
from weft.algorithms.rewards import penalize_overlong
from weft.algorithms.sampling import Sampling
from weft.controllers.driver import Driver
from weft.controllers.reports.symptoms import FIRST_WITHOUT_SIGNAL, GOES_ON, Watch, mistakes
from weft.controllers.schedule import Synchronous
from weft.dataflow.batch import Batch
from weft.dataflow.byte_units import GIB
from weft.dataflow.errors import SymptomError, UserError
from weft.dataflow.graph import Graph, group
from weft.dataflow.metrics import Mean, Metrics
from weft.dataflow.operation import Shape, TrainingBatch
from weft.dataflow.runs.alerts import read_alerts
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.reward import RewardWorker
from weft.workers.rewards.function import Reward
from weft.workers.worker import remote


class RateConfig(ToyConfig):
    learning_rate: float = 1e-3


class RatedActor(ToyActor):
    Config = RateConfig


class SampledRollout(ToyRollout):
    """Reports its sampling settings."""

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        shape=Shape.EXPAND,
        reads=("prompt_ids",),
        writes=("response_ids", "response_logprobs", "response_versions"),
    )
    def generate(self, prompts: Batch, *, n: int = 2, sampling: Sampling = Sampling()) -> Any:
        return super().generate(prompts, n=n)


class ConstantReward(ToyReward):
    """Gives every response the same reward."""

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids", "answer"), writes=("reward",))
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        return samples.with_columns(reward=[1.0] * len(samples)), {
            "mean": Mean(float(len(samples)), len(samples))
        }


@graph
def training(
    prompts: Any,
    *,
    rollout: Any,
    reward: Any,
    actor: Any,
    n: int = 2,
    sampling: Sampling = Sampling(),
    estimator: Estimator = group_normalized,
) -> Any:
    samples = reward.score(rollout.generate(prompts, n=n, sampling=sampling))
    return actor.update(group_advantages(samples, estimator=estimator))


def recorded(*, rate: float = 1e-3, reward: type = ToyReward, **settings: Any) -> Graph:
    made = {
        "rollout": group(SampledRollout),
        "reward": group(reward),
        "actor": group(RatedActor, learning_rate=rate),
    }
    made["rollout"].follows(made["actor"])
    return training(prompts(8), **made, **settings)


def own_estimator(outcomes: Outcomes) -> Any:
    return outcomes.rewards - outcomes.rewards.mean()


@pytest.mark.parametrize(
    "estimator",
    [
        group_normalized,
        group_centred,
        leave_one_out,
        length_weighted,
        valid_groups_centred,
        best_of_group,
        functools.partial(group_normalized, epsilon=1e-3),
    ],
)
def test_one_response_to_a_prompt_is_refused_where_responses_are_compared(
    estimator: Estimator, tmp_path: Path
):
    with pytest.raises(
        UserError, match=r"'group_advantages' .*n=1 samples one response each.* Set n=2 or more"
    ):
        Driver(recorded(n=1, estimator=estimator), schedule=Synchronous(steps=1), root=tmp_path)
    Driver(recorded(n=2, estimator=estimator), schedule=Synchronous(steps=1), root=tmp_path)


@pytest.mark.parametrize("filtering", [drop_zero_variance, best_and_worst])
def test_one_response_to_a_prompt_is_refused_before_a_filter_that_compares(
    filtering: Any, tmp_path: Path
):
    @graph
    def filtered(prompts: Any, *, rollout: Any, reward: Any, actor: Any, n: int) -> Any:
        samples: Any = filtering(reward.score(rollout.generate(prompts, n=n)))
        return actor.update(centred(samples))

    handles = recorded().handles
    with pytest.raises(UserError, match=f"'{filtering.__name__}' compares the responses"):
        Driver(filtered(prompts(8), **handles, n=1), schedule=Synchronous(steps=1), root=tmp_path)


def test_a_quorum_of_one_response_is_refused_like_one_response(tmp_path: Path):
    @graph
    def quorum(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
        samples: Any = first_of_group(reward.score(rollout.generate(prompts, n=4)), 1)
        return actor.update(group_advantages(samples))

    with pytest.raises(UserError, match="compares the responses"):
        Driver(quorum(prompts(8), **recorded().handles), schedule=Synchronous(steps=1), root=tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"n": 1, "estimator": own_estimator},
            "node 'group_advantages' has one response to each prompt (n=1), and its estimator reads no other column",
        ),
        (
            {"sampling": Sampling(temperature=0)},
            "node 'rollout.generate' trains on responses of temperature 0",
        ),
        (
            {"rate": 1000.0},
            "worker group 'actor' has learning_rate=1000, and a step moves each weight by about that much",
        ),
    ],
)
def test_a_mistake_found_before_the_start_is_reported_with_advice(settings: dict[str, Any], says: str):
    made = recorded(**settings)
    (said,) = mistakes(made, made.handles)
    assert said.startswith(says) and "Try " in said


def right(response: str) -> float:
    return float("4" in response)


def test_a_filter_that_compares_shaped_rewards_is_reported():
    def said_of(functions: Any, by: str, shaped: bool = False) -> list[str]:
        @graph
        def filtered(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
            samples: Any = reward.score(rollout.generate(prompts, n=4))
            if shaped:
                samples = penalize_overlong(samples, max_tokens=8, buffer_tokens=4)
            samples = drop_zero_variance(samples, by=by)
            return actor.update(group_advantages(samples))

        handles: dict[str, Any] = dict(recorded().handles)
        handles["reward"] = group(RewardWorker, name="reward", function=functions, tokenizer="model")
        given = {name: handles[name] for name in ("rollout", "reward", "actor")}
        source = TableSource("sums", pa.table({"prompt_ids": [[1]], "answer": ["4"]}))
        made = filtered(source, **given)
        return mistakes(made, made.handles)

    both = (Reward(function=Exact(), name="right"), Reward(function=right, name="form", weight=0.1))
    (said,) = said_of(both, "reward")
    assert said.startswith(
        "node 'drop_zero_variance' compares 'reward', the sum of the outcome 'reward/right' and form; shaping"
    )
    (said,) = said_of(Exact(), "shaped_reward", shaped=True)
    assert "compares 'shaped_reward', which 'penalize_overlong' has shaped" in said
    assert said_of(both, "reward/right") == [] == said_of(Exact(), "reward")
    only_measured = (both[0], Reward(function=right, name="form", weight=0.0))
    assert said_of(only_measured, "reward") == []
    assert said_of((right, centred_form), "reward") == [], "none of them is known to be the outcome"


def test_an_evaluation_may_be_greedy():
    @graph
    def greedy(prompts: Any, *, rollout: Any, reward: Any) -> Any:
        return reward.score(rollout.generate(prompts, n=1, sampling=Sampling(temperature=0)))

    made = greedy(prompts(8), **{name: recorded().handles[name] for name in ("rollout", "reward")})
    assert mistakes(made, made.handles) == []


def centred_form(response: str) -> float:
    return len(response) / 8


def test_signal_that_only_comes_from_shaping_is_reported():
    def row(step: int, share: float) -> dict[str, float]:
        return {"step": float(step), "groups_without_signal": 0.5, "signal_of_shaping": share}

    watch = Watch()
    assert [s.symptom.name for k in range(1, 3) for s in watch.see(row(k, 1.0))] == []
    assert [s.symptom.name for k in range(3, 5) for s in watch.see(row(k, 1.0))] == ["only_shaping"]
    watch = Watch()
    rows = [row(1, 1.0), row(2, 1.0), row(3, 0.9), row(4, math.nan), row(5, 1.0), row(6, 1.0)]
    assert [s.symptom.name for each in rows for s in watch.see(each)] == []


def test_correct_code_gets_no_warning():
    made = recorded()
    assert mistakes(made, made.handles) == []

    @graph
    def with_a_baseline(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
        greedy = reward.score(rollout.generate(prompts, n=1, sampling=Sampling(temperature=0)))
        return actor.update(centred(greedy))

    own = with_a_baseline(prompts(8), **made.handles)
    assert len(mistakes(own, own.handles)) == 1, (
        "of one greedy response nothing is compared by a node that is known to"
    )
    assert greedy_baseline.reads


def seen(*rows: dict[str, float], quantised: str = "") -> list[str]:
    watch = Watch(quantised)
    return [
        seen.text for step, row in enumerate(rows) for seen in watch.see({"step": float(step), **row})
    ]


def test_rewards_equal_from_the_first_step_are_reported_once():
    none, some = {"groups_without_signal": 1.0}, {"groups_without_signal": 0.9}
    (said,) = seen({}, *[none] * 10)
    assert (
        said.startswith(
            f"in each of the first {FIRST_WITHOUT_SIGNAL} steps the rewards within every group are equal"
        )
        and "Try " in said
    )
    assert seen({}, none, some, *[none] * 3) == [], "one group told answers apart"
    assert seen({}, *[{"eval/groups_without_signal": 1.0}] * 10) == [], (
        "an evaluation learns nothing anyhow"
    )


def test_fully_truncated_responses_are_reported_once():
    (said,) = seen({}, *[{"rollout/truncation_rate": 1.0}] * 10)
    assert "every response is truncated at its limit of tokens" in said and "max_tokens" in said
    assert seen({}, *[{"rollout/truncation_rate": 0.99}] * 10) == []
    cut, not_measured = {"rollout/truncation_rate": 1.0}, {"actor/loss": 0.1}
    assert len(seen({}, cut, {"rollout/truncation_rate": 0.5}, cut, not_measured, cut, cut)) == 1, (
        "later, and with a gap"
    )
    assert seen({}, cut, cut, {"rollout/truncation_rate": 0.5}, cut, cut) == []


def test_groups_that_lost_their_signal_are_reported_with_the_reward():
    some, none = (
        {"groups_without_signal": 0.2},
        {"groups_without_signal": 0.96, "reward/mean": 0.99},
    )
    (said,) = seen({}, some, *[none] * 9)
    assert said.startswith("steps 2 to 6: 96% of the groups have equal rewards (reward 0.99)")
    assert "the prompts are learned" in said and "drop_zero_variance" in said
    assert seen({}, some, *[none] * 4, some, *[none] * 4) == []


def test_equal_rewards_are_reported_where_no_group_compares_them():
    equal = {"reward/mean": 0.5, "reward/std": 0.0}
    (said,) = seen({}, *[equal] * 10)
    assert said.startswith("steps 1 to 3: all rewards are equal (all are 0.5)") and "Try " in said
    assert seen({}, equal, equal, {"reward/mean": 0.5, "reward/std": 0.1}, equal, equal) == []
    assert seen({}, *[{"eval/reward/std": 0.0}] * 10) == [], "an evaluation may well be perfect"


def test_a_collapsing_entropy_is_reported_with_its_earlier_value():
    undecided, decided = {"actor/entropy": 2.0}, {"actor/entropy": 0.09}
    (said,) = seen({}, *[undecided] * 3, *[decided] * 5)
    assert (
        "actor/entropy is 0.09 nats a token, and was 2 at first" in said
        and "entropy_coefficient" in said
    )
    assert seen({}, *[undecided] * 3, decided, decided, undecided, decided) == []
    assert seen({}, *[{"actor/entropy": 0.001}] * 10) == [], "it began so"


def test_a_drifting_logprob_gap_is_reported_with_its_earlier_value():
    def gap(value: float) -> dict[str, float]:
        return {"actor/mean_logprob_gap": value}

    (said,) = seen({}, *[gap(0.01)] * 3, *[gap(0.08)] * 5)
    assert (
        "actor/mean_logprob_gap is 0.08 nats a token, and was 0.01 at first" in said
        and "max_staleness" in said
    )
    assert seen({}, *[gap(1e-6)] * 3, *[gap(1e-3)] * 5) == [], "rounding"
    assert seen({}, *[gap(0.03)] * 3, *[gap(0.08)] * 5) == [], (
        "a low precision has had it from the start"
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"actor/mean_logprob_gap": 0.08}, "actor/mean_logprob_gap is 0.08, and safe up to 0.05: "),
        ({"actor/generator_kl_k3": 0.02}, "actor/generator_kl_k3 is 0.02, and safe up to 0.01: "),
        ({"actor/truncated_fraction": 0.4}, "actor/truncated_fraction is 0.4, and safe up to 0.3: "),
        ({"actor/masked_fraction": math.nan}, "actor/masked_fraction is nan, and safe up to 0.3: "),
        ({"actor/loss": 0.1}, "no metric of the update shows how far the quantised weights of "),
    ],
)
def test_an_unsafe_gap_of_quantised_rollouts_is_reported_with_its_number(
    row: dict[str, float], says: str
):
    usual = {"actor/mean_logprob_gap": 0.01, "actor/generator_kl_k3": 1e-4, "actor/loss": 0.1}
    usual |= {"actor/truncated_fraction": 0.01, "actor/masked_fraction": 0.0}
    rows = {}, {"rollout/tokens": 5.0}, usual, row if row.keys() == {"actor/loss"} else usual | row
    (said,) = seen(*rows, quantised="rollout (int8)")
    assert (
        said.startswith(f"step 3: {says}") and "rollout (int8)" in said and "TruncatedImportance" in said
    )
    assert seen(*rows) == [], "without quantised rollouts"
    assert seen(*rows[:3], quantised="rollout (int8)") == []


class QuantisedConfig(ToyConfig):
    quantization: str | None = None


class QuantisedRollout(SampledRollout):
    Config = QuantisedConfig


def test_updates_that_cannot_correct_or_see_a_quantised_rollout_are_named_at_the_start():
    @graph
    def trains(prompts: Any, *, rollout: Any, reward: Any, actor: Any, loss: Any) -> Any:
        samples = reward.score(rollout.generate(prompts, n=2))
        return actor.update(group_advantages(samples), loss=loss)

    def told(loss: Any, **settings: Any) -> list[str]:
        made = {
            "rollout": group(QuantisedRollout, **settings),
            "reward": group(ToyReward),
            "actor": group(weft.ActorWorker, model="m"),
        }
        found = trains(prompts(8), **made, loss=loss)
        return mistakes(found, found.handles)

    (said,) = told(PolicyLoss(), quantization="int8")
    assert said.startswith(
        "node 'actor.update' trains on samples of rollout (int8), whose weights are quantised"
    )
    assert "without a correction" in said and "TruncatedImportance()" in said
    assert told(PolicyLoss()) == []
    assert told(PolicyLoss(correction=TruncatedImportance()), quantization="int8") == []
    assert told(NegativeLogLikelihood(), quantization="int8") == [], "it has no correction to set"


def test_an_update_that_does_not_read_the_log_probabilities_of_a_quantised_rollout_is_named():
    handles = recorded().handles
    made = {**handles, "rollout": group(QuantisedRollout, quantization="w4a16")}
    found = training(prompts(8), **made)
    (said,) = mistakes(found, found.handles)
    assert "of rollout (w4a16)" in said and "does not read 'response_logprobs'" in said


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"actor/loss": math.nan}, "step 2: actor/loss is nan. "),
        ({"actor/grad_norm": 3e7}, "step 2: actor/grad_norm is 3e+07. "),
        ({"actor/approx_kl": math.inf}, "step 2: actor/approx_kl is inf nats a token. "),
        ({"actor/mean_logprob_gap": 7.5}, "step 2: actor/mean_logprob_gap is 7.5 nats a token. "),
    ],
)
def test_absurd_numbers_are_reported_at_once_and_only_once(row: dict[str, float], says: str):
    usual = {
        "actor/loss": 0.1,
        "actor/grad_norm": 2.0,
        "actor/approx_kl": 0.01,
        "actor/mean_logprob_gap": 1e-6,
    }
    (said,) = seen({}, usual, usual | row, usual, usual | row)
    assert said.startswith(says) and "learning_rate" in said


def memory(resident: float, free: float) -> dict[str, float]:
    return {
        "host_limit_bytes": 64 * GIB,
        "host_free_bytes": free,
        "reward/resident_bytes": resident,
        "driver/resident_bytes": GIB,
    }


def test_nearly_full_memory_is_reported_with_its_users():
    (said,) = seen({}, memory(40 * GIB, 20 * GIB), *[memory(55 * GIB, 5 * GIB)] * 5)
    assert said.startswith(
        "step 2: 5.0 GiB of the 64.0 GiB of host memory of a node are left (reward 55.0 GiB, driver 1.0 GiB). "
    )
    assert seen({}, *[memory(GIB, 5 * GIB)] * 5) == [], "others take it"


def test_growing_memory_is_reported_with_the_time_left():
    (said,) = seen({}, *[memory((2 + 0.1 * k) * GIB, (50 - 0.1 * k) * GIB) for k in range(60)])
    assert "step 32: the host memory of reward grows by 102 MiB a step" in said
    assert said.count("lasts for about 469 steps. ") == 1 and "resume='latest'" in said
    assert seen({}, *[memory(2 * GIB + 40 * GIB * (k > 5), 20 * GIB) for k in range(90)]) == [], (
        "it came up and stays"
    )
    assert seen({}, *[memory((2 + k % 7) * GIB, 20 * GIB) for k in range(90)]) == [], (
        "it goes up and down"
    )


def test_a_run_reports_why_it_cannot_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with Driver(
        recorded(reward=ConstantReward, rate=1000.0),
        schedule=Synchronous(steps=5, prompts_per_step=4),
        root=tmp_path,
        name="run",
        stop_on=(),
    ) as driver:
        metrics = driver.run()
    assert [row["groups_without_signal"] for row in metrics[1:]] == [1.0] * 5
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert (
        len(warned) == 2
        and "learning_rate=1000" in warned[0]
        and "rewards within every group are equal" in warned[1]
    )
    alerts = read_alerts(tmp_path / "run")
    assert [(alert.name, alert.step, alert.ends) for alert in alerts] == [
        ("mistake", 0, False),
        ("no_signal", 2, False),
    ]
    assert [f"warning: {alert.text}" for alert in alerts] == warned


class DivergingActor(RatedActor):
    """Returns a loss of nan in the third step."""

    steps = 0

    @remote(
        dispatch=Dispatch.SPLIT_BY_DP,
        reads=lambda loss: ("prompt_ids", "response_ids", *loss.reads),
        may_read=("response_versions",),
        takes=TrainingBatch(),
    )
    def update(self, samples: Batch, *, loss: ToyLoss = ToyLoss()) -> Metrics:
        self.steps += 1
        return {**super().update(samples, loss=loss), "loss": Mean(math.nan if self.steps >= 3 else 0.1)}


def test_a_symptom_that_is_named_ends_the_run_and_spoiled_weights_are_not_saved(tmp_path: Path):
    made = {"rollout": group(SampledRollout), "reward": group(ToyReward), "actor": group(DivergingActor)}
    made["rollout"].follows(made["actor"])
    with (
        Driver(
            training(prompts(8), **made),
            schedule=Synchronous(steps=9, prompts_per_step=4),
            root=tmp_path,
            name="run",
            progress=False,
            stop_on=("no_signal", "diverged"),
        ) as driver,
        pytest.raises(SymptomError, match=r"step 3: actor/loss is nan\. .*stop_on=\(\)"),
    ):
        driver.run()
    assert [(alert.name, alert.step, alert.ends) for alert in read_alerts(tmp_path / "run")] == [
        ("diverged", 3, True)
    ]
    assert len(driver.directory.metrics) == 4


@pytest.mark.parametrize("wrong", ["no_signal", ("no_signl",), 3])
def test_a_symptom_that_there_is_not_is_refused_with_the_nearest(tmp_path: Path, wrong: Any):
    with pytest.raises(UserError, match=r"Driver\(stop_on=.*no_signal"):
        Driver(recorded(), schedule=Synchronous(), root=tmp_path, stop_on=wrong)
    assert not list(tmp_path.iterdir())


def test_the_advice_to_continue_names_settings_of_the_driver_and_of_train():
    assert "Driver(stop_on=...)" in GOES_ON and "stop_on" in inspect.signature(Driver).parameters
    assert "weft.train" in GOES_ON and "explain=True" in GOES_ON
    assert "explain" in inspect.signature(weft.train).parameters
