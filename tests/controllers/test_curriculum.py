"""Runs with a curriculum: prompts follow the outcomes, and a resumed run draws as if never stopped."""

import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from saved_runs import Killed, SavingActor
from toy import SlowRollout, ToyReward, centred, prompts

from weft.algorithms.grpo import drop_zero_variance
from weft.controllers.driver import Driver
from weft.controllers.loop.run import Run
from weft.controllers.recovery.checkpoints import CheckpointConfig, complete_checkpoints
from weft.controllers.schedule import Asynchronous, Pipelined, Synchronous, Training
from weft.controllers.signals import ask_to_end
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.check import check_log
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.metric_names import undeclared, untimed
from weft.dataflow.metrics import Metrics
from weft.dataflow.prompts.curriculum import Curriculum, Gate, Pool
from weft.dataflow.prompts.prompt_queue import read_state
from weft.dataflow.prompts.prompts import Prompts
from weft.dataflow.runs.alerts import read_alerts
from weft.dataflow.runs.files import LOG
from weft.dataflow.runs.log import LogReader
from weft.dataflow.tracing import graph
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

ON_POLICY = [Synchronous(steps=9, prompts_per_step=3), Pipelined(steps=9, prompts_per_step=3)]
ASYNCHRONOUS = Asynchronous(steps=9, prompts_per_step=3, max_staleness=1)
CURRICULUM = Curriculum(
    pools=(Pool(name="hard", up_to=0.4), Pool(name="easy", share=2)),
    retire=(Gate(at_least=1.0, times=1, return_after=3), Gate(at_most=0.0, times=2, return_after=2)),
)


class Coin(ToyReward):
    """Solves every fourth prompt always, and others by chance, from the number of the group."""

    @remote(dispatch=Dispatch.SPLIT_BY_DP, reads=("response_ids", "answer"), writes=("reward",))
    def score(self, samples: Batch) -> tuple[Batch, Metrics]:
        seen: Counter[int] = Counter()
        rewards: list[float] = []
        rows = zip(samples["answer"].to_pylist(), samples["group_id"].to_pylist(), strict=True)
        for answer, number in rows:
            seen[number] += 1
            chance = np.random.default_rng((int(answer), number, seen[number]))
            rewards.append(1.0 if int(answer) % 4 == 0 else float(chance.random() < 0.4))
        return samples.with_columns(reward=np.array(rewards, np.float32)), {}


@graph
def filtered(prompts, *, rollout, reward, actor):
    samples: Any = drop_zero_variance(reward.score(rollout.generate(prompts, n=2)))
    return actor.update(centred(samples))


def source(curriculum: Curriculum = CURRICULUM, number: int = 12) -> Prompts:
    return Prompts("prompts", prompts(number).table).with_curriculum(curriculum)


def run(
    root: Path,
    schedule: Training,
    *,
    kill_at: int | None = None,
    curriculum: Curriculum = CURRICULUM,
    **settings: Any,
) -> tuple[list[Any], list[dict[str, float]]]:
    rollout, actor = group(SlowRollout, name="rollout"), group(SavingActor, name="actor")
    rollout.follows(actor)
    reward = group(Coin, name="reward")

    def stop(metrics: Mapping[str, float]) -> bool:
        if kill_at is not None and metrics["step"] >= kill_at:
            raise Killed
        return False

    with Driver(
        filtered(source(curriculum), rollout=rollout, reward=reward, actor=actor),
        schedule=schedule,
        checkpoint=CheckpointConfig(every=settings.pop("every", 2)),
        root=root,
        stop=stop,
        **{"name": "run", "progress": False, **settings},
    ) as driver:
        metrics = driver.run()
        return driver.call(actor, "weights")[0], metrics


class _Result(NamedTuple):
    run: Path
    weights: list[Any]
    metrics: list[dict[str, float]]


def issued(run: Path) -> list[int]:
    records = LogReader(run / "buffer" / LOG)
    return [p for record in records if record["do"] == "issue" for p in record["positions"]]


def state(run: Path) -> pa.Table:
    found = read_state(complete_checkpoints(run / "checkpoints")[0])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Training], _Result]:
    """A run of each schedule that nothing interrupts, made once."""
    made: dict[str, _Result] = {}

    def of(schedule: Training) -> _Result:
        name = type(schedule).__name__
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            made[name] = _Result(root / "run", *run(root, schedule))
        return made[name]

    return of


def test_solved_prompts_retire_and_return_although_a_filter_drops_their_groups(
    uninterrupted: Callable[[Training], _Result],
):
    whole = uninterrupted(ON_POLICY[0])
    last = whole.metrics[-1]
    assert last["curriculum/retired"] > 0 and last["curriculum/returned"] > 0
    assert not undeclared(n for row in whole.metrics for n in row if n.startswith("curriculum/"))
    assert "functions/outcomes" not in last
    assert "curriculum/in_easy" in pq.read_table(whole.run / "metrics.parquet").column_names
    retired = np.flatnonzero(state(whole.run)["retired_at"].to_numpy() >= 0)
    assert len(retired) == last["curriculum/retired"]
    # Always solved: two of two responses, in a group that the filter drops.
    assert {0, 4, 8} & set(retired.tolist())
    drawn = issued(whole.run)
    assert sum(p % 4 == 0 for p in drawn) < len(drawn) / 4, "they come less often than others"
    assert not check_log(whole.run / "buffer").violations


@pytest.mark.parametrize("schedule", ON_POLICY, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    "kill_at", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 2, 6, 8))]
)
def test_an_on_policy_run_resumes_as_if_never_stopped(
    tmp_path: Path,
    schedule: Training,
    kill_at: int,
    uninterrupted: Callable[[Training], _Result],
):
    whole = uninterrupted(schedule)
    with pytest.raises(Killed):
        run(tmp_path, schedule, kill_at=kill_at)
    weights, again = run(tmp_path, schedule, resume="latest")
    assert weights == whole.weights
    assert [untimed(row) for row in again] == [untimed(row) for row in whole.metrics]
    assert state(tmp_path / "run").equals(state(whole.run), check_metadata=True)
    assert issued(tmp_path / "run") == issued(whole.run)


@pytest.mark.parametrize("waits", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 4, 6))])
def test_a_run_stopped_in_the_middle_of_a_step_draws_as_if_never_stopped(
    tmp_path: Path,
    waits: int,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Callable[[Training], _Result],
):
    """Lengths of the toy's responses depend on the other prompts of a call, so they may differ."""
    whole, seen = uninterrupted(ON_POLICY[0]), 0
    settle = Run._settle

    def settle_and_ask(run: Run) -> None:
        nonlocal seen
        settle(run)
        seen += run.graph_runs.train.step >= 3
        if seen == waits:
            ask_to_end(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_settle", settle_and_ask)
        with pytest.raises(SystemExit):
            run(tmp_path, ON_POLICY[0], every=100)
    weights, _ = run(tmp_path, ON_POLICY[0], resume="latest")
    assert [number for number, _ in weights] == [number for number, _ in whole.weights]
    assert issued(tmp_path / "run") == issued(whole.run)
    assert state(tmp_path / "run").equals(state(whole.run), check_metadata=True)


@pytest.mark.parametrize("kills", [(4, 4, 8), pytest.param((1,), marks=pytest.mark.slow)])
def test_an_asynchronous_run_loses_nothing_and_keeps_its_curriculum(
    tmp_path: Path, kills: tuple[int, ...]
):
    for number, kill_at in enumerate(kills):
        with pytest.raises(Killed):
            run(tmp_path, ASYNCHRONOUS, kill_at=kill_at, resume="latest" if number else "none")
    weights, metrics = run(tmp_path, ASYNCHRONOUS, resume="latest")
    assert [row["step"] for row in metrics] == list(range(10))
    groups = [number for number, _ in weights]
    assert len(groups) == 2 * len(set(groups)) == 2 * 27
    assert not check_log(tmp_path / "run" / "buffer").violations
    assert metrics[-1]["curriculum/lost_groups"] == 0


def test_a_resume_without_the_log_keeps_solve_rates_and_issues_lost_prompts_first(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, ASYNCHRONOUS, kill_at=5)
    folder = complete_checkpoints(tmp_path / "run" / "checkpoints")[0]
    before = read_state(folder)
    assert before is not None
    (tmp_path / "run" / "buffer" / LOG).unlink()
    _, metrics = run(tmp_path, ASYNCHRONOUS, resume="weights")
    assert [row["step"] for row in metrics] == list(range(10))
    measured = sum(any(votes) for votes in before["votes"].to_pylist())
    resumed = next(row for row in metrics if row["step"] == int(folder.name[-6:]) + 1)
    assert resumed["curriculum/unmeasured"] <= 12 - measured


def test_changed_settings_of_the_curriculum_are_reported_and_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(Killed):
        run(tmp_path, ON_POLICY[0], kill_at=5)
    other = Curriculum(pools=(Pool(name="all"),))
    _, metrics = run(tmp_path, ON_POLICY[0], curriculum=other, resume="latest", progress="plain")
    assert "changed since the checkpoint: curriculum." in capsys.readouterr().out
    assert metrics[-1]["curriculum/retired"] == 0
    assert metrics[-1]["curriculum/in_all"] + metrics[-1]["curriculum/in_new"] == 12


def test_a_run_whose_prompts_all_retire_goes_on_with_those_that_retired_first(tmp_path: Path):
    """A batch has 3 of 4 prompts. Each prompt retires after every group."""
    always = Curriculum(retire=(Gate(at_least=0.0, times=1),))

    @graph
    def plain(prompts, *, rollout, reward, actor):
        return actor.update(centred(reward.score(rollout.generate(prompts, n=2))))

    rollout, actor = group(SlowRollout, name="rollout"), group(SavingActor, name="actor")
    rollout.follows(actor)
    made = plain(source(always, 4), rollout=rollout, reward=group(Coin, name="reward"), actor=actor)
    with Driver(made, schedule=ON_POLICY[0], root=tmp_path, name="run", progress=False) as driver:
        metrics = driver.run()
    assert len(metrics) == 10
    for name in ("returned", "returned_early"):
        assert metrics[-1][f"curriculum/{name}"] == 9 * 3 - 4
    alert = next(one for one in read_alerts(tmp_path / "run") if one.name == "all_retired")
    assert "no prompt left to draw" in alert.text and "loosen the gates" in alert.text
    counts = np.bincount(issued(tmp_path / "run"))
    assert counts.max() - counts.min() <= 1


def test_rounds_of_sorted_prompts_are_refused_beside_a_curriculum(tmp_path: Path):
    with pytest.raises(UserError, match=r"rounds=3\) sorts .* a curriculum .* rounds=1"):
        run(tmp_path, Synchronous(steps=9, prompts_per_step=3, rounds=3))


def test_more_votes_than_responses_are_refused_before_the_start(tmp_path: Path):
    with pytest.raises(UserError, match=r"votes=3\): .* a prompt has 2 responses; set votes=2 or less"):
        run(tmp_path, ON_POLICY[0], curriculum=Curriculum(votes=3))
