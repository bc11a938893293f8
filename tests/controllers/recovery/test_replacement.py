"""Dead worker processes are replaced and get the current weights; their rows are requeued. With
real deaths on Ray."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ahead import RayAhead
from saved_runs import SavingActor, trained
from toy import SlowConfig, SlowRollout, ToyConfig, ToyReward, centred, prompts, toy_grpo, toy_reinforce

from weft.controllers.backends.backend import Backend
from weft.controllers.backends.local import Local
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool
from weft.controllers.recovery.checkpoints import CheckpointConfig
from weft.controllers.schedule import Asynchronous, Synchronous, Training
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import WorkerError
from weft.dataflow.graph import group
from weft.dataflow.metrics import Metrics, Sum
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.reward import RewardWorker
from weft.workers.worker import remote

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class DyingConfig(SlowConfig):
    folder: Path = Path()
    """Folder for one file per death."""
    dies_at: int = -1
    """Die at a prompt with this first token."""
    dies_at_version: int = -1
    """Die when weights of this version arrive."""
    deaths: int = 1
    max_failed: float = 0.0


def die(folder: Path, what: str, times: int) -> None:
    """Exit the process, up to `times` times per `what`."""
    number = len(list(folder.glob(f"{what}_*")))
    if number < times:
        (folder / f"{what}_{number}").touch()
        os._exit(9)


class DyingRollout(SlowRollout):
    Config = DyingConfig
    replaceable = True

    def generate(self, prompts: Batch, *, n: int = 2) -> Iterator[tuple[Batch, Metrics] | None]:
        yield None
        if any(ids[0] == self.config.dies_at for ids in prompts["prompt_ids"].to_pylist()):
            die(self.config.folder, "generates", self.config.deaths)
        yield from super().generate(prompts, n=n)

    def receive_weights(self, weights: Any) -> str:
        if self.context.rank == 1 and weights.version == self.config.dies_at_version:
            die(self.config.folder, "takes_weights_over", self.config.deaths)
        return super().receive_weights(weights)


class DyingRewardConfig(ToyConfig):
    folder: Path = Path()
    dies_at: int = -1
    deaths: int = 1


class DyingReward(ToyReward):
    Config = DyingRewardConfig
    replaceable = True

    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        if str(self.config.dies_at) in samples["answer"].to_pylist():
            die(self.config.folder, "scores", self.config.deaths)
        return super().score(samples)


def run(
    tmp_path: Path,
    schedule: Training,
    rollout: dict[str, Any],
    reward: dict[str, Any] | None = None,
    *,
    whole: bool = False,
) -> Any:
    """Run with two generating ranks, and a reward or a group function where the test needs one."""
    folder = tmp_path / "deaths"
    folder.mkdir()
    made = {
        "rollout": group(DyingRollout, name="rollout", folder=folder, **rollout),
        "actor": group(SavingActor, name="actor"),
    }
    if reward is not None or whole:
        made["reward"] = group(DyingReward, name="reward", folder=folder, **(reward or {}))
    made["rollout"].follows(actor := made["actor"])
    with Driver(
        (toy_grpo if whole else toy_reinforce)(prompts(10), **made),
        schedule=schedule,
        placement={
            "rollout": Place(ResourcePool("generating", cpus=1), ranks=2),
            "actor": Place(ResourcePool("training", cpus=1)),
        },
        backend=RayBackend(),
        root=tmp_path,
        name="run",
        record_every=0,
        progress=False,
    ) as driver:
        metrics = driver.run()
        weights = driver.call(actor, "weights")[0]
    assert not check_log(tmp_path / "run" / "buffer").violations
    groups = trained(weights)
    assert len(weights) == 2 * len(groups) == 2 * 4 * schedule.steps, (
        "nobody is trained on twice, nor by half"
    )
    assert len(list(folder.iterdir())) == metrics[-1]["replaced_workers"]
    return metrics


SYNCHRONOUS = Synchronous(steps=4, prompts_per_step=4)
ASYNCHRONOUS = Asynchronous(steps=4, prompts_per_step=4)
both = pytest.mark.parametrize("schedule", [SYNCHRONOUS, ASYNCHRONOUS], ids=lambda s: type(s).__name__)


@pytest.mark.thorough
def test_ranks_that_die_while_they_generate_score_and_take_weights_over_are_replaced(tmp_path: Path):
    metrics = run(
        tmp_path, ASYNCHRONOUS, {"dies_at": 31, "dies_at_version": 2}, {"dies_at": 3}, whole=True
    )
    assert metrics[-1]["replaced_workers"] == 3
    assert all(row.get("actor/lag", 0) <= (ASYNCHRONOUS.max_staleness or 0) for row in metrics)


@pytest.mark.slow
@both
def test_a_rollout_that_dies_while_it_generates(tmp_path: Path, schedule: Training):
    metrics = run(tmp_path, schedule, {"dies_at": 31, "deaths": 2}, whole=True)
    assert all(row.get("actor/lag", 0) <= (schedule.max_staleness or 0) for row in metrics)


@pytest.mark.slow
@both
def test_a_rollout_that_dies_while_it_takes_weights_over(tmp_path: Path, schedule: Training):
    run(tmp_path, schedule, {"dies_at_version": 2})


@pytest.mark.slow
def test_a_reward_that_dies(tmp_path: Path):
    run(tmp_path, ASYNCHRONOUS, {}, {"dies_at": 3})


@pytest.mark.thorough
def test_deaths_at_the_same_sample_end_the_run_and_name_it(tmp_path: Path):
    with pytest.raises(
        WorkerError,
        match=r"worker rollout\[\d\], node 'rollout.generate' was lost 3 times at sample .*row 3 of source",
    ):
        run(tmp_path, SYNCHRONOUS, {"dies_at": 31, "deaths": 9})


class MortalConfig(ToyConfig):
    folder: Path = Path()
    deaths: int = 1


class MortalActor(SavingActor):
    Config = MortalConfig

    def publish_weights(self, version: int, receivers: Sequence[str] = ()) -> Any:
        if version == 3:
            die(self.config.folder, "publishes", self.config.deaths)
        return super().publish_weights(version, receivers)


def mortal(
    tmp_path: Path, schedule: Training, actor_class: type[MortalActor] = MortalActor, **settings: Any
) -> Driver:
    (tmp_path / "deaths").mkdir()
    rollout = group(SlowRollout, name="rollout")
    actor = group(
        actor_class, name="actor", folder=tmp_path / "deaths", deaths=settings.pop("deaths", 1)
    )
    rollout.follows(actor)
    places = {name: Place(ResourcePool(name, cpus=1)) for name in ("rollout", "actor")}
    return Driver(
        toy_reinforce(prompts(10), rollout=rollout, actor=actor),
        schedule=schedule,
        placement=places,
        backend=RayAhead((tmp_path / "deaths" / "hangs").exists),
        root=tmp_path,
        name="run",
        record_every=0,
        progress=False,
        **settings,
    )


@pytest.mark.slow
def test_an_actor_that_dies_ends_a_run_without_checkpoints(tmp_path: Path):
    with (
        pytest.raises(WorkerError, match=r"worker actor.0., call 'publish_weights': its process ended"),
        mortal(tmp_path, SYNCHRONOUS) as driver,
    ):
        driver.run()


class FrailActor(MortalActor):
    """Dies once, and hangs once when it reaches the same place again."""

    def publish_weights(self, version: int, receivers: Sequence[str] = ()) -> Any:
        if version == 3:
            die(self.config.folder, "publishes", 1)
        if version == 3 and not (self.config.folder / "hangs").exists():
            (self.config.folder / "hangs").touch()
            time.sleep(1000)
        return SavingActor.publish_weights(self, version, receivers)


@pytest.mark.thorough
def test_a_run_with_checkpoints_survives_a_dead_and_a_hanging_actor(tmp_path: Path):
    every = CheckpointConfig(every=1)
    with mortal(tmp_path, ASYNCHRONOUS, FrailActor, checkpoint=every) as driver:
        metrics = driver.run()
        (actor,) = (g.handle for g in driver.groups.values() if g.name == "actor")
        weights = driver.call(actor, "weights")[0]
    assert {path.name for path in (tmp_path / "deaths").iterdir()} == {"publishes_0", "hangs"}
    assert [row["step"] for row in metrics] == list(range(ASYNCHRONOUS.steps + 1))
    assert len(weights) == 2 * len(trained(weights)) == 2 * 4 * ASYNCHRONOUS.steps
    assert not check_log(tmp_path / "run" / "buffer").violations


@pytest.mark.slow
@both
def test_a_run_with_checkpoints_survives_the_death_of_its_actor(tmp_path: Path, schedule: Training):
    with mortal(tmp_path, schedule, checkpoint=CheckpointConfig(every=1)) as driver:
        metrics = driver.run()
        (actor,) = (g.handle for g in driver.groups.values() if g.name == "actor")
        weights = driver.call(actor, "weights")[0]
    assert [row["step"] for row in metrics] == list(range(schedule.steps + 1))
    assert len(weights) == 2 * len(trained(weights)) == 2 * 4 * schedule.steps
    assert not check_log(tmp_path / "run" / "buffer").violations


@pytest.mark.slow
def test_an_actor_that_dies_again_and_again_ends_the_run(tmp_path: Path):
    with (
        pytest.raises(WorkerError, match=r"worker actor.0., call 'publish_weights': its process ended"),
        mortal(tmp_path, SYNCHRONOUS, checkpoint=CheckpointConfig(every=1), deaths=99) as driver,
    ):
        driver.run()
    assert len(list((tmp_path / "deaths").iterdir())) == 4


# Failures without deaths


def flaky(folder: Path, *, at: str, times: int, how: str) -> Any:
    """Return a reward function that fails `times` times at one answer."""

    def length(response_ids: list[int], answer: str) -> float:
        number = len(list(folder.iterdir()))
        if answer == at and number < times:
            (folder / str(number)).touch()
            if how == "hangs":
                time.sleep(1000)
            raise ConnectionError("the judge does not answer")
        return float(len(response_ids))

    return length


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, which these functions do not use."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("words")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0}, unk_token="<end>")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def scored(
    tmp_path: Path, words: Path, how: str, times: int, backend: Backend, **settings: Any
) -> list[dict[str, float]]:
    folder = tmp_path / "failures"
    folder.mkdir()
    rollout, actor = group(SlowRollout, name="rollout"), group(SavingActor, name="actor")
    function = flaky(folder, at="3", times=times, how=how)
    reward = group(RewardWorker, name="reward", function=function, tokenizer=words, **settings)
    rollout.follows(actor)
    graph = toy_reinforce(prompts(10), rollout=rollout, reward=reward, actor=actor)
    schedule = Synchronous(steps=4, prompts_per_step=4)
    with Driver(
        graph,
        schedule=schedule,
        backend=backend,
        root=tmp_path,
        name="run",
        record_every=0,
        progress=False,
    ) as driver:
        metrics = driver.run()
        weights = driver.call(actor, "weights")[0]
    assert not check_log(tmp_path / "run" / "buffer").violations
    assert len(weights) == 2 * len(trained(weights)) == 2 * 4 * schedule.steps, (
        "nobody is trained on twice, nor by half"
    )
    assert len(list(folder.iterdir())) == times
    return metrics


@pytest.mark.thorough
def test_a_reward_that_hangs_is_ended_and_its_sample_is_asked_again(tmp_path: Path, words: Path):
    backend = RayAhead((tmp_path / "failures" / "0").exists)
    metrics = scored(tmp_path, words, "hangs", 1, backend, deadline_s=600)
    assert metrics[-1]["replaced_workers"] == 1


@pytest.mark.slow
def test_a_sample_at_which_the_reward_always_hangs_ends_the_run_and_no_other_is_blamed(
    tmp_path: Path, words: Path
):
    with pytest.raises(
        WorkerError,
        match=r"node 'reward.score' was lost 3 times at sample \d+ \(row 3 of source 'prompts'\)\. So did .*To replay .*"
        r"it did not answer for 2 s",
    ):
        scored(tmp_path, words, "hangs", 9, RayBackend(), deadline_s=1, max_failed=0)


def test_a_reward_that_hangs_in_this_process_is_interrupted_and_its_sample_asked_again(
    tmp_path: Path, words: Path
):
    metrics = scored(
        tmp_path, words, "hangs", 1, Local(), deadline_s=0.2
    )  # waited out; the others return at once
    assert metrics[-1]["requeued_rows"] > 0 and "replaced_workers" not in metrics[-1]


def test_a_reward_that_always_hangs_in_this_process_ends_the_run_with_its_sample(
    tmp_path: Path, words: Path
):
    said = r"sample \d+ \(row 3 of source 'prompts'\)\..*TimeoutError: reward function .*length took longer than 0\.2 s"
    with pytest.raises(WorkerError, match=said):
        scored(tmp_path, words, "hangs", 9, Local(), deadline_s=0.2, max_failed=0)  # waited out


def test_a_reward_that_fails_now_and_then_is_asked_again(tmp_path: Path, words: Path):
    metrics = scored(tmp_path, words, "raises", 2, Local())
    assert metrics[-1]["requeued_rows"] > 0 and "replaced_workers" not in metrics[-1]


def test_a_sample_at_which_the_reward_always_fails_ends_the_run_and_is_named(
    tmp_path: Path, words: Path
):
    with pytest.raises(
        WorkerError, match=r"node 'reward.score' failed 3 times at sample \d+ \(row 3 of "
    ) as caught:
        scored(tmp_path, words, "raises", 9, Local(), max_failed=0)
    assert "ConnectionError: the judge does not answer" in str(caught.value) and "in length" in str(
        caught.value
    )


class StumblingReward(ToyReward):
    """Scores row by row, and fails before the last one, twice."""

    replaceable = True
    failed = 0

    def score(self, samples: Batch) -> Iterator[tuple[Batch, Metrics]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for k in range(len(samples)):
            if self.failed < 2 and k == len(samples) - 1 > 0:
                self.failed += 1
                raise ConnectionError("the judge does not answer")
            yield super().score(samples.slice(k, 1))[0], {"scored": Sum(1.0)}


def test_metrics_before_a_failure_count_as_often_as_their_rows(tmp_path: Path):
    rollout, actor = group(SlowRollout, name="rollout"), group(SavingActor, name="actor")
    reward = group(StumblingReward, name="reward")
    rollout.follows(actor)
    graph = toy_grpo(prompts(10), rollout=rollout, reward=reward, actor=actor)
    schedule = Synchronous(steps=3, prompts_per_step=4)
    with Driver(graph, schedule=schedule, root=tmp_path, name="run", progress=False) as driver:
        metrics = driver.run()
    assert metrics[-1]["requeued_rows"] == 2
    assert [row["reward/scored"] for row in metrics[1:]] == [row["samples"] for row in metrics[1:]]


class Watcher(ToyReward):
    """Reads rows and writes none. It fails once, after it has reported metrics of some."""

    replaceable = True
    failed = False

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids",))
    def watch(self, samples: Batch) -> Iterator[Metrics]:
        yield {"watched": Sum(1.0)}
        if not self.failed:
            self.failed = True
            raise ConnectionError("the judge does not answer")
        yield {"watched": Sum(float(len(samples) - 1))}


@graph
def watched_grpo(prompts: Any, *, rollout: Any, reward: Any, watcher: Any, actor: Any) -> Any:
    samples = rollout.generate(prompts, n=2)
    watcher.watch(samples)
    return actor.update(centred(reward.score(samples)))


def test_metrics_of_a_node_without_columns_count_once_after_a_retry(
    tmp_path: Path,
):
    made = {"rollout": group(SlowRollout), "actor": group(SavingActor)}
    made["rollout"].follows(made["actor"])
    graph = watched_grpo(prompts(10), **made, reward=group(ToyReward), watcher=group(Watcher))
    schedule = Synchronous(steps=3, prompts_per_step=4)
    with Driver(graph, schedule=schedule, root=tmp_path, name="run", progress=False) as driver:
        metrics = driver.run()
    assert metrics[-1]["requeued_rows"] > 0
    assert [row["watcher/watched"] for row in metrics[1:]] == [row["samples"] for row in metrics[1:]]


class HangingActor(MortalActor):
    def publish_weights(self, version: int, receivers: Sequence[str] = ()) -> Any:
        hangs = self.config.folder / "hangs"
        if version == 3 and not hangs.exists():
            hangs.touch()
            time.sleep(1000)
        return SavingActor.publish_weights(self, version, receivers)


@pytest.mark.slow
def test_a_run_with_a_hanging_actor_resumes_from_its_checkpoint(tmp_path: Path):
    every = CheckpointConfig(every=1)
    with mortal(tmp_path, SYNCHRONOUS, HangingActor, checkpoint=every) as driver:
        metrics = driver.run()
    assert [row["step"] for row in metrics] == list(range(SYNCHRONOUS.steps + 1))
    assert not check_log(tmp_path / "run" / "buffer").violations
