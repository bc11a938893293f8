"""The timeline: idle time and shares by hand, windows of steps, and pictures of few and of many
calls."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_grpo  # pyright: ignore[reportMissingImports]

from weft.controllers.driver import Driver
from weft.controllers.schedule import Synchronous
from weft.dashboard.pictures import COLOURS, draw_timeline
from weft.dashboard.timeline import (
    CallLog,
    Lane,
    Timeline,
    load_timeline,
    node_times,
    select_steps,
    summary,
    write_trace,
)
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.runs.directory import RunDirectory


def call(
    step: int, group: str, node: str, start_s: float, end_s: float, rows: int = 8, **rest: Any
) -> dict[str, Any]:
    """Return a row of the timeline."""
    times = {"start_s": start_s, "end_s": end_s, "worker_s": (end_s - start_s) / 2}
    return {"step": step, "group": group, "node": node, "rows": rows, **times, **rest}


def window(calls: Iterable[Mapping[str, Any]], steps: str = ":") -> Timeline:
    return select_steps(CallLog.of_rows(calls), steps)


def gaps(lane: Lane, most: int | None = None) -> list[tuple[float, float, str, str]]:
    """Return start, end, and the nodes before and after each gap."""
    return [
        (
            gap.start_s,
            gap.end_s,
            lane.node_at(gap.before) if gap.before >= 0 else "start",
            lane.node_at(gap.after) if gap.after >= 0 else "end",
        )
        for gap in lane.gaps(most)
    ]


STEPS = [
    call(0, "actor", "publish", 0, 1, rows=0),
    call(0, "rollout", "generate", 1, 4),
    call(0, "actor", "update", 4, 6),
    call(1, "rollout", "generate", 6, 7),
    call(1, "actor", "update", 7, 10),
]
"""Two steps without overlap."""


def many(num_calls: int, groups: int = 4, nodes: int = 3) -> list[dict[str, Any]]:
    """Calls of all groups in turn, 6 per step, with a longer pause in the middle."""
    return [
        call(
            k // 6,
            f"group {k % groups}",
            f"node {k % nodes}",
            0.01 * k + 20 * (k > num_calls / 2),
            0.01 * (k + 0.9) + 20 * (k > num_calls / 2),
        )
        for k in range(num_calls)
    ]


def write(calls: list[dict[str, Any]], root: Path) -> Path:
    """Write a run directory with these calls, like the driver."""
    directory = RunDirectory.create(root, "run")
    for one in calls:
        directory.add_call(**one)
    directory.flush()
    return directory.path


def pixels(path: Path, colour: str) -> float:
    """Return the share of the picture with this colour."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    return float((np.abs(imread(path)[..., :3] - np.array(to_rgb(colour))) < 0.01).all(axis=-1).mean())


# Numbers


def test_idle_time_and_gaps_by_hand():
    actor, rollout = window(STEPS).lanes
    assert [lane.name for lane in (actor, rollout)] == ["actor", "rollout"]
    assert gaps(actor) == [(1, 4, "publish", "update"), (6, 7, "update", "update")]
    assert gaps(rollout) == [
        (0, 1, "start", "generate"),
        (4, 6, "generate", "generate"),
        (7, 10, "generate", "end"),
    ]
    assert (actor.idle_share, rollout.idle_share) == (0.4, 0.6)
    assert gaps(actor, 1) == [(1, 4, "publish", "update")], "the longest"


def test_calls_that_overlap_are_one_busy_stretch():
    calls = [call(0, "g", "long", 0, 8), call(0, "g", "inner", 2, 3), call(0, "g", "next", 9, 10)]
    (lane,) = window(calls).lanes
    assert gaps(lane) == [(8, 9, "long", "next")]
    assert [(start, end, len(nodes)) for start, end, nodes in lane.stretches] == [
        (0, 2, 1),
        (2, 3, 2),
        (3, 8, 1),
        (9, 10, 1),
    ]


def test_a_window_cuts_calls_that_cross_its_ends():
    calls = [
        call(0, "a", "n", 0, 4),
        call(1, "b", "n", 2, 6),
        call(1, "a", "n", 7, 8),
        call(2, "b", "n", 7, 12),
    ]
    cut = window(calls, "1")
    assert (cut.start_s, cut.end_s, cut.steps) == (4, 8, [(1, 8)])
    a, b = cut.lanes
    assert (a.idle_share, b.idle_share) == (0.75, 0.25)
    assert len(cut.ended) == 2, "the call of step 2 is seen, and counted in its own step"


def test_a_group_without_a_call_in_the_window_is_idle():
    cut = window([*STEPS, call(2, "actor", "update", 10, 12)], "2")
    assert [(lane.name, lane.idle_share) for lane in cut.lanes] == [("actor", 0.0), ("rollout", 1.0)]


@pytest.mark.parametrize("num_bins", [1, 7, 400])
def test_shares_of_time_add_up_to_the_busy_time(num_bins: int):
    timeline = window(many(3000))
    for lane in timeline.lanes:
        shares = lane.shares(timeline.node_order, num_bins)
        assert shares.min() >= 0 and shares.sum(axis=0).max() <= 1 + 1e-9
        assert shares.sum() / num_bins == pytest.approx(1 - lane.idle_share, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "steps"), [(":", [0, 1, 2, 3]), ("1:3", [1, 2]), ("2:", [2, 3]), (":2", [0, 1]), ("3", [3])]
)
def test_steps_are_named_like_python_slices(text: str, steps: list[int]):
    calls = [call(step, "a", "n", step, step + 1) for step in range(4)]
    assert [step for step, _ in window(calls, text).steps] == steps


@pytest.mark.parametrize("text", ["", "a", "10-20", "1:2:3", "-1", "1.5"])
def test_steps_that_are_none_are_refused(text: str):
    with pytest.raises(UserError, match=r"steps are given as 10:20"):
        window(STEPS, text)


@pytest.mark.parametrize("steps", ["2:", ":0", "1:1", "7"])
def test_steps_that_the_run_does_not_have_are_named(steps: str):
    with pytest.raises(UserError, match=f"no step in {steps}; it has steps 0 to 1"):
        window(STEPS, steps)


# Text


def test_the_summary_shows_busy_groups_and_the_slowest_calls():
    assert summary(window(STEPS)).splitlines() == [
        "steps 0 to 1: 5 calls in 10.00 s",
        "",
        "group    calls  busy %  idle %  longest gap  between",
        "actor        3    60.0    40.0       3.00 s  publish and update, at 1.00 s",
        "rollout      2    40.0    60.0       3.00 s  generate and end, at 7.00 s",
        "",
        "group    node      calls  rows  seconds   in worker  mean call  share %",
        "actor    update        2    16      5.00       2.50     2.50 s     50.0",
        "rollout  generate      2    16      4.00       2.00     2.00 s     40.0",
        "actor    publish       1     0      1.00       0.50     1.00 s     10.0",
    ]
    assert summary(window(STEPS, "1")).startswith("step 1: 2 calls in 4.00 s")


# Pictures


def test_a_picture_of_few_calls_has_a_bar_for_each(tmp_path: Path):
    path = draw_timeline(window(STEPS), tmp_path / "few.png", "run")
    for colour in COLOURS[:3]:
        assert pixels(path, colour) > 0.005
    assert pixels(path, COLOURS[3]) == 0


def test_a_picture_of_many_calls_shows_the_pause(tmp_path: Path):
    timeline = window(many(10_000))
    assert timeline.lanes[0].gaps(1)[0].seconds > 19
    path = draw_timeline(timeline, tmp_path / "many.png", "run")
    assert all(pixels(path, colour) > 0.005 for colour in COLOURS[:3])


@pytest.mark.thorough
def test_a_picture_has_room_for_many_groups_and_nodes(tmp_path: Path):
    path = draw_timeline(window(many(300, groups=20, nodes=15)), tmp_path / "wide.png", "run")
    assert all(pixels(path, colour) > 0 for colour in COLOURS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "calls",
    [
        [call(0, "a", "n", 1, 1)],
        [call(0, "a", "n", 0, 0)],
        [call(3, "a", "n", 0, 1e-9)],
        many(2000, groups=1, nodes=1),
    ],
    ids=["a moment", "nothing", "a blink", "one group"],
)
def test_odd_timelines_are_drawn_too(calls: list[dict[str, Any]], tmp_path: Path):
    timeline = window(calls)
    assert draw_timeline(timeline, tmp_path / "odd.svg", "run").stat().st_size > 1000
    assert "calls in" in summary(timeline)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    for name in ("picture.xyz", "nowhere/picture.png"):
        with pytest.raises(UserError, match=f"the picture cannot be written to .*{name}"):
            draw_timeline(window(STEPS), tmp_path / name, "run")


# Traces


def trace_of(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    return json.loads(write_trace(timeline, path / "trace.json").read_text())["traceEvents"]


def slices_of(events: list[dict[str, Any]], track: str) -> list[tuple[float, float, str]]:
    """Return start and end [us] and the name of each slice on the tracks of this name."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [e for e in events if e["ph"] == "X" and names[e["pid"], e["tid"]] == track]
    return [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in found]


def test_a_trace_has_a_slice_for_each_call_and_an_instant_for_each_step(tmp_path: Path):
    events = trace_of(window(STEPS), tmp_path)
    assert slices_of(events, "actor") == [
        (0, 1e6, "publish"),
        (4e6, 6e6, "update"),
        (7e6, 10e6, "update"),
    ]
    assert [(e["name"], e["ts"], e["ph"]) for e in events if e["ph"] == "i"] == [
        ("step 0", 6e6, "i"),
        ("step 1", 10e6, "i"),
    ]
    update = next(e for e in events if e["name"] == "update")
    assert update["args"] == {"step": 0, "rows": 8, "worker_s": 1.0}


def test_a_trace_of_some_steps_has_only_their_calls(tmp_path: Path):
    events = trace_of(window(STEPS, "1"), tmp_path)
    assert [e["args"]["step"] for e in events if e["ph"] == "X"] == [1, 1]


def test_ranks_have_tracks_below_their_group(tmp_path: Path):
    by_rank = [{"rank": 0, "end_s": 1.0, "worker_s": 0.5}, {"rank": 1, "end_s": 3.0, "worker_s": 2.5}]
    calls = [call(0, "rollout", "generate", 0, 3, by_rank=by_rank), call(0, "actor", "update", 3, 4)]
    events = trace_of(window(calls), tmp_path)
    assert slices_of(events, "rollout") == [(0, 3e6, "generate")]
    assert slices_of(events, "rollout[0]") == [(0.5e6, 1e6, "generate")]
    assert slices_of(events, "rollout[1]") == [(0.5e6, 3e6, "generate")]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"rollout", "actor"}


def test_slices_of_a_track_nest_and_add_up_to_the_times_of_the_reader(tmp_path: Path):
    draw = np.random.default_rng(0)
    starts = draw.uniform(0, 100, 400).round(3)
    spans = zip(starts.tolist(), (starts + draw.uniform(0, 5, 400).round(3)).tolist(), strict=True)
    calls = [call(0, f"g{k % 2}", f"n{k % 5}", *span) for k, span in enumerate(spans)]
    timeline = window(calls)
    events = [e for e in trace_of(timeline, tmp_path) if e["ph"] == "X"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], round(e["ts"] + e["dur"], 3)))
    assert len(tracks) > 4, "calls that cross are on different tracks"
    for slices in tracks.values():
        for start, end in slices:
            crossing = [s for s in slices if start < s[0] < end < s[1]]
            assert not crossing
    seconds = Counter[str]()
    for e in events:
        seconds[e["name"]] += e["dur"] / 1e6
    known = Counter[str]()
    for node in node_times(timeline):
        known[node["node"]] += node["seconds"]
    assert dict(seconds) == pytest.approx(dict(known), abs=1e-6)


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"the trace cannot be written to .*nowhere/trace\.json"):
        write_trace(window(STEPS), tmp_path / "nowhere" / "trace.json")


# Files


def test_written_samples_are_read_back(tmp_path: Path):
    read, known = load_timeline(write(STEPS, tmp_path)), window(STEPS)
    assert summary(read) == summary(known) and read.steps == known.steps


def test_a_real_run_accounts_for_all_of_its_time(tmp_path: Path):
    rollout, actor = group(ToyRollout), group(ToyActor)
    rollout.follows(actor)
    training = toy_grpo(prompts(8), rollout=rollout, reward=group(ToyReward), actor=actor)
    with Driver(
        training,
        schedule=Synchronous(steps=5, prompts_per_step=4),
        root=tmp_path,
        name="toy",
        progress=False,
    ) as driver:
        driver.run()
    timeline = load_timeline(tmp_path / "toy")
    assert [step for step, _ in timeline.steps] == [0, 1, 2, 3, 4, 5]
    [updates] = [node for node in node_times(timeline) if node["node"] == "actor.update"]
    assert (updates["calls"], updates["rows"]) == (5, 5 * 8)
    for lane in timeline.lanes:
        busy = (lane.end_s - lane.start_s).sum()
        assert busy + lane.idle_s >= timeline.seconds - 1e-9 and 0 <= lane.idle_share <= 1
    ends = [end for _, end in timeline.steps]
    assert ends == sorted(ends) and ends[-1] == timeline.end_s
    assert pixels(draw_timeline(timeline, tmp_path / "toy.png", "toy"), COLOURS[0]) > 0.005


def test_a_run_without_a_timeline_is_reported(tmp_path: Path):
    (tmp_path / "toy").mkdir()
    with pytest.raises(UserError, match=r"there is no run .*tyo; did you mean 'toy'"):
        load_timeline(tmp_path / "tyo")
    with pytest.raises(UserError, match=r"has no timeline: nothing was called yet"):
        load_timeline(tmp_path / "toy")
    (tmp_path / "toy" / "timeline.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="cannot be read"):
        load_timeline(tmp_path / "toy")
