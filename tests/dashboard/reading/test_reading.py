"""Reading run directories: curves, samples, lanes, buffer and workers, of intact and broken
runs."""

import errno
import json
import os
import shutil
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served import client_of  # pyright: ignore[reportMissingImports]
from starlette.testclient import TestClient

from weft.dashboard.reading.catalogue import Catalogue
from weft.dashboard.reading.comparison import metrics_of
from weft.dashboard.reading.lanes import _Lanes
from weft.dashboard.reading.metrics import MetricLog
from weft.dashboard.reading.sample_index import SampleIndex
from weft.dashboard.reading.turns import token_texts
from weft.dashboard.timeline import CallLog
from weft.dataflow.runs.directory import RunDirectory
from weft.dataflow.runs.files import METRICS, TIMELINE
from weft.dataflow.runs.follow import FollowedTable
from weft.dataflow.runs.tables import CALLS, VALUES, TableStream

PAGES = ("run", "alerts", "graph", "timeline", "buffer", "workers", "weights", "samples", "groups")


def asked(client: TestClient, run: str) -> dict[str, dict]:
    """Return the answer for each page of a run."""
    found = {page: client.get(f"/api/{page}", params={"run": run}) for page in PAGES}
    found["metrics"] = client.get("/api/metrics", params={"runs": run})
    found["curves"] = client.get("/api/curves", params={"runs": run, "names": "reward/mean,step"})
    assert {page: answer.status_code for page, answer in found.items()} == dict.fromkeys(found, 200)
    return {page: answer.json() for page, answer in found.items()}


def test_every_page_of_a_finished_run_has_its_data(client: TestClient):
    said = asked(client, "one")
    assert said["run"]["status"] == "done" and said["run"]["step"] == said["run"]["steps"] == 3
    assert [card["id"] for card in said["metrics"]["cards"]][:1] == ["reward"]
    [reward, step] = said["curves"]["series"]
    assert reward["x"] == [1, 2, 3] and step["y"] == [0, 1, 2, 3]
    nodes = {node["name"]: node for node in said["graph"]["nodes"] if node["graph"] == "train"}
    assert nodes["actor.update"]["done"] == 3 * 4 * 2 and nodes["actor.update"]["waiting"] == 0
    assert nodes["rollout.generate"]["code"]["file"].endswith("toy.py")
    edges = [(edge["from"], edge["to"], edge["columns"]) for edge in said["graph"]["edges"]]
    assert ("reward.score", "centred", ["reward"]) in edges and (
        "prompts",
        "reward.score",
        ["answer"],
    ) in edges
    [edge] = said["graph"]["weights"]
    assert (edge["from"], edge["to"], edge["version"], edge["behind"]) == ("actor", "rollout", 3, 0)
    assert (
        said["buffer"]["totals"]["done"] == said["buffer"]["totals"]["issued"]
        and not said["buffer"]["leases"]
    )
    assert [one["counts"] for one in said["buffer"]["staleness"]] == [{"0": 8}] * 3
    assert {lane["lane"] for lane in said["timeline"]["lanes"] if lane["kind"] == "evaluation"} == {
        "eval"
    }
    assert {one["rank"] for one in said["workers"]["workers"]} >= {"actor[0]", "rollout[0]", "driver"}
    assert [one["version"] for one in said["weights"]["versions"]] == [0, 1, 2, 3]


def test_a_list_of_runs_has_a_line_for_each(client: TestClient):
    said = client.get("/api/runs").json()
    assert [run["run"] for run in said["runs"]] == ["one", "two"] and not said["single"]
    assert all(run["status"] == "done" and len(run["spark"]) == 3 for run in said["runs"])


def test_samples_are_filtered_sorted_and_followed(client: TestClient):
    def samples(**values: str | int) -> dict:
        return client.get("/api/samples", params={"run": "one", **values}).json()

    everything = samples(limit=500)
    assert everything["total"] == 3 * 8 + 3 * 2 == len(everything["rows"]) and everything["indexed"] == {
        "read": 6,
        "files": 6,
    }
    long = samples(filter="length >= 2 and kind = train", sort="-advantage")
    assert long["total"] == 12 and all(row["length"] == 2 for row in long["rows"])
    by_advantage = [row["advantage"] for row in long["rows"]]
    assert by_advantage == sorted(by_advantage, reverse=True)
    for wrong, said in (
        ("lenth > 1", "did you mean 'length'"),
        ("reward", "COLUMN OPERATOR VALUE"),
        ("step > x", "'x' cannot be read as int64"),
    ):
        assert said in samples(filter=wrong)["message"]
    groups = client.get(
        "/api/groups", params={"run": "one", "sort": "step", "filter": "kind=train"}
    ).json()
    assert groups["total"] == 12 and groups["groups"][0]["rewards"] == [1, 2]
    one = client.get("/api/group", params={"run": "one", "id": groups["groups"][0]["group"]}).json()
    [first, second] = one["samples"]
    assert (
        second["columns"]["logprob"] == [-1, -1]
        and second["columns"]["version"] == [0, 0]
        and len(second["tokens"]) == 2
    )
    assert first["advantage"] == -0.5
    visits = client.get("/api/prompt", params={"run": "one", "key": one["prompt_key"]}).json()["visits"]
    assert [visit["step"] for visit in visits] == sorted(visit["step"] for visit in visits)
    assert one["group"] in [visit["group"] for visit in visits]
    assert client.get("/api/prompt", params={"run": "one", "key": "unknown"}).status_code == 400


def test_gap_and_ratio_follow_from_the_trainers_own_logprobs(tmp_path: Path):
    run = tmp_path / "runs" / "own"
    RunDirectory.create(run.parent, run.name).close()
    (run / "samples").mkdir()
    columns = {"sample_id": [1], "group_id": [0], "response_ids": [[5, 6]], "response_mask": [[1, 0]]}
    columns |= {"response_logprobs": [[-1.0, -2.0]], "old_logprobs": [[-0.5, -2.0]]}
    columns |= {"entropies": [[0.25, 1.5]]}
    with pa.ipc.new_file(
        str(run / "samples" / "train_000001.1.0.arrow"), (table := pa.table(columns)).schema
    ) as writer:
        writer.write_table(table)
    group = client_of(run.parent).get("/api/group", params={"run": "own", "id": 0}).json()
    found = group["samples"][0]["columns"]
    assert found["gap"] == [0.5, 0] and found["ratio"] == pytest.approx([np.exp(0.5), 1], rel=1e-4)
    assert (
        found["mask"] == [1, 0]
        and found["trainer_logprob"] == [-0.5, -2]
        and found["entropy"] == [0.25, 1.5]
    )


def test_rows_that_two_recorders_wrote_count_once(runs: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(runs / "one", run)
    before = len(SampleIndex(run).table())
    twice = next((run / "samples").glob("train_000002.*"))
    shutil.copy(twice, twice.with_name("train_000002.999.0.arrow"))
    assert len(SampleIndex(run).table()) == before


def test_two_runs_are_compared_down_to_a_token(client: TestClient, runs: Path):
    said = client.get("/api/compare", params={"a": "one", "b": "two"}).json()
    assert {"name": "seed", "a": 0, "b": 1} in said["settings"] and not said["versions"]
    assert said["first_difference"]["a"]["id"] == said["first_difference"]["b"]["id"]
    (compared,) = (row for row in said["metrics"] if row["name"] == "reward/mean")
    last = {run: metrics_of(runs / run, [])[3]["reward/mean"] for run in ("one", "two")}
    assert (compared["a"], compared["b"]) == (last["one"], last["two"]) and said["notes"] == []
    same = client.get("/api/compare", params={"a": "one", "b": "one"}).json()
    assert same["settings"] == [] and same["first_difference"] is None


def test_a_comparison_says_what_could_not_be_read(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "one", tmp_path / "whole")
    shutil.copytree(runs / "one", tmp_path / "damaged")
    (tmp_path / "damaged" / f"{METRICS}.parquet").write_bytes(b"no metrics")
    said = client_of(tmp_path).get("/api/compare", params={"a": "whole", "b": "damaged"}).json()
    assert said["metrics"] == [] and any("damaged: metrics of" in note for note in said["notes"])


def test_why_a_group_without_samples_waits_is_answered(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(runs / "one", tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "samples")
    client = client_of(tmp_path)
    said = client.get("/api/group", params={"run": "one", "id": 0}).json()
    assert "was finished" in said["waits"][0]
    # A page does not wait for a large log to be read.
    monkeypatch.setattr("weft.dashboard.reading.run_pages.MOST_LOG", 100)
    refused = client.get("/api/group", params={"run": "one", "id": 0})
    assert refused.status_code == 400 and "weft buffer why" in refused.json()["message"]


# Broken runs


@pytest.mark.parametrize("how", ["cut", "garbage", "emptied", "gone", "a folder"])
def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(runs: Path, tmp_path: Path, how: str):
    run = tmp_path / "runs" / "one"
    shutil.copytree(runs / "one", run)
    files = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "lock"]
    for path in files:
        data = path.read_bytes()
        path.unlink()
        if how == "a folder":
            path.mkdir()
        elif how != "gone":
            path.write_bytes(
                {"cut": data[: len(data) // 2], "garbage": b"\xff\x00<script>" * 40, "emptied": b""}[how]
            )
    client = client_of(tmp_path / "runs")
    if how == "gone":
        shutil.rmtree(run / "lock")
    if client.get("/api/runs").json()["runs"]:
        said = asked(client, "one")
        assert said["run"]["status"] in ("done", "stopped", "unknown", "empty")
        if how in ("cut", "garbage"):
            assert said["run"]["damage"], "what cannot be read is named"


def test_a_run_with_wrong_values_in_its_files_is_shown(runs: Path, tmp_path: Path):
    run = tmp_path / "runs" / "one"
    shutil.copytree(runs / "one", run)
    (run / "config.json").write_text(
        '{"schedule": 7, "graphs": [], "placement": "x", "groups": null, "buffer": []}'
    )
    (run / "live.json").write_text(
        '{"graphs": {"train": 3, "eval": {"nodes": [], "oldest": []}}, "groups": {"actor": null}, "hosts": []}'
    )
    (run / "graph.json").write_text('{"train": {"source": null, "nodes": []}, "eval": 1}')
    (run / "alerts.jsonl").write_text(
        '[]\n{"name": 1}\n{"name": "x", "text": "t", "step": 1, "time": 1.5, "ends": false}\nnull\n'
    )
    asked(client_of(tmp_path / "runs"), "one")


DEEP = "[" * 200_000
HOLDER = {"epoch": 1, "host": "h", "machine": "m", "pid": 1, "started": "", "since": ""}
NO_STEPS = ('"x"', "null", "{}", "1" + "0" * 400)
WRONG = {
    "alerts.jsonl": [
        DEEP,
        *(f'{{"name": "x", "text": "t", "step": {step}, "time": 1.5}}' for step in NO_STEPS),
    ],
    "config.json": [DEEP],
    "lock": [
        DEEP,
        *(json.dumps(HOLDER | wrong) for wrong in ({"pid": "x"}, {"pid": 10**30}, {"since": 5})),
    ],
    "live.json": [DEEP],
    "graph.json": [DEEP],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_run_does_not_affect_the_others(runs: Path, tmp_path: Path, name: str):
    shutil.copytree(runs / "one", tmp_path / "runs" / "sound")
    run = tmp_path / "runs" / "wrong, it is"
    shutil.copytree(runs / "one", run)
    file = next((run / "lock").iterdir()) if name == "lock" else run / name
    for text in WRONG[name]:
        file.write_text(text)
        client = client_of(tmp_path / "runs")
        assert [one["run"] for one in client.get("/api/runs").json()["runs"]] == [
            "sound",
            "wrong, it is",
        ]
        both = "sound,wrong%2C it is"
        answers = [client.get("/api/curves", params={"runs": both, "names": "reward/mean"})]
        answers += [
            client.get(f"/api/{page}", params={"run": "wrong, it is"})
            for page in ("run", "alerts", "graph", "buffer", "workers")
        ]
        assert [answer.status_code for answer in answers] == [200] * 6, text[:80]


def test_samples_that_are_cut_while_they_are_looked_at_are_still_there(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "one", tmp_path / "runs" / "one")
    client = client_of(tmp_path / "runs")
    before = client.get("/api/samples", params={"run": "one"}).json()
    for path in (tmp_path / "runs" / "one" / "samples").iterdir():
        os.truncate(path, 100)
    assert client.get("/api/samples", params={"run": "one"}).json()["total"] == before["total"] > 0


def test_a_killed_run_is_read_from_its_streams(runs: Path, tmp_path: Path):
    run = tmp_path / "runs" / "one"
    shutil.copytree(runs / "one", run)
    for name, schema in ((METRICS, VALUES), (TIMELINE, CALLS)):
        (run / f"{name}.parquet").unlink()
        stream = TableStream(run / f"{name}.arrows", schema)
        stream.add(**({"step": 1.0, "name": "step", "value": 1.0} if name == METRICS else CALL))
        stream.close()
        with (run / f"{name}.arrows").open("ab") as file:
            file.write(b"\xff\xff\xff\xff\x00\x10\x00\x00torn")
    said = asked(client_of(tmp_path / "runs"), "one")
    assert said["run"]["step"] == 1 and [lane["group"] for lane in said["timeline"]["lanes"]] == [
        "actor"
    ]


CALL = {
    "step": 1,
    "graph": "train",
    "group": "actor",
    "node": "actor.update",
    "start_s": 0.5,
    "end_s": 2.0,
    "worker_s": 1.0,
}
CALL |= {"rows": 8, "tokens": 80, "last": True}


def test_a_run_without_a_step_and_an_empty_folder_have_pages(tmp_path: Path):
    root = tmp_path / "runs"
    root.mkdir()
    client = client_of(root)
    assert client.get("/api/runs").json()["runs"] == []
    directory = RunDirectory.create(root, "begun")
    client = client_of(root)
    said = asked(client, "begun")
    assert (
        said["run"]["status"] in ("running", "empty")
        and said["run"]["step"] == 0
        and said["curves"]["series"] == []
    )
    assert directory.lock is not None
    directory.lock.release()


TEXTS = {
    "html": "</script><img src=x onerror=alert(1)><b>bold</b>",
    "ansi": "\x1b[31mred\x1b[0m\x07\x00\x9b31m",
    "bidi": "\u202eevil\u2066\u200b",
    "lines": "x" * (5 << 20),
    "broken": "\ufffd\ud7ff𝕏",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_text_of_a_model_is_escaped_everywhere(tmp_path: Path, kind: str):
    text, run = TEXTS[kind], tmp_path / "runs" / "told"
    directory = RunDirectory.create(run.parent, run.name)
    directory.add_metrics({"step": 0.0, "time_s": 0.1, text[:50]: 1.0})
    directory.add_call(**{**CALL, "node": text[:200], "group": "actor"})
    directory.close()
    assert directory.lock is not None
    directory.lock.release()
    samples = {
        "sample_id": [1],
        "group_id": [0],
        "prompt": [text],
        "response": [text],
        "finish_reason": [text],
        "reward": [0.5],
    }
    (run / "samples").mkdir()
    with pa.ipc.new_file(
        str(run / "samples" / "train_000001.1.0.arrow"), (table := pa.table(samples)).schema
    ) as writer:
        writer.write_table(table)
    (run / "alerts.jsonl").write_text(
        json.dumps({"name": text[:80], "text": text, "step": 1, "time": 1.0, "ends": False}) + "\n"
    )
    (run / "config.json").write_text(
        json.dumps({"settings": {"note": text}, "placement": {text[:60]: {"ranks": 1}}})
    )
    (run / "logs" / "actor_0.log").write_text(text)
    client = client_of(run.parent)
    said = asked(client, "told")
    group = client.get("/api/group", params={"run": "told", "id": 0}).json()
    shown = group["samples"][0]["response"]
    assert shown == text or (
        len(text) > 1 << 20 and shown.startswith(text[:1000]) and len(shown) < 1 << 20
    )
    assert said["alerts"]["alerts"][0]["text"] == text
    for address in (*(f"/api/{page}?run=told" for page in PAGES), "/api/log?run=told&worker=actor[0]"):
        answer = client.get(address)
        assert (
            answer.headers["content-type"].startswith("application/json")
            and answer.headers["x-content-type-options"] == "nosniff"
        )
    assert client.get("/api/log", params={"run": "told", "worker": "actor[0]"}).json()["text"] in text


# Parts


def test_metrics_follow_a_stream_and_restart_with_it(tmp_path: Path):
    log, stream = MetricLog(tmp_path), TableStream(tmp_path / "metrics.arrows", VALUES)
    log.refresh()
    assert log.names == [] and log.last == {}
    for step in range(3):
        stream.add(step=float(step), name="step", value=float(step))
        stream.add(step=float(step), name="loss", value=1.0 / (step + 1))
        stream.flush()
        log.refresh()
        assert log.last == {"step": step, "loss": pytest.approx(1 / (step + 1))}
    stream.add(step=1.0, name="eval/accuracy", value=0.25)
    stream.add(step=1.0, name="loss", value=7.0)
    stream.close()
    log.refresh()
    steps, values = log.series("loss")
    assert steps.tolist() == [0, 1, 2] and values.tolist() == pytest.approx([1, 7, 1 / 3]), (
        "what is written later counts"
    )
    (tmp_path / "metrics.arrows").unlink()
    again = TableStream(tmp_path / "metrics.arrows", VALUES)
    again.add(step=0.0, name="step", value=0.0)
    again.close()
    log.refresh()
    assert log.names == ["step"], "the run went back"


def test_metrics_beyond_the_limit_of_pages_are_cut_with_a_notice(tmp_path: Path):
    most, many = 5000, 20_000
    for name in ("parquet", "stream"):
        (tmp_path / name).mkdir()
    pq.write_table(
        pa.table({"step": [1.0], **{f"m/{k}": [float(k)] for k in range(many)}}),
        tmp_path / "parquet" / "metrics.parquet",
    )
    stream = TableStream(tmp_path / "stream" / "metrics.arrows", VALUES)
    for name in ("step", *(f"m/{k}" for k in range(many))):
        stream.add(step=1.0, name=name, value=1.0)
    stream.close()
    for name, left_out in (
        ("parquet", f"{many + 1 - most:,}"),
        ("stream", "at least 5,000"),
    ):  # names of a stream are kept
        log = MetricLog(tmp_path / name)
        log.refresh()
        assert len(log.names) == most and log.last["step"] == 1
        assert log.damage is not None and f"has {left_out} metrics more than the {most:,}" in log.damage
        log.refresh()
        assert log.damage is not None, "it is still so"


def test_a_file_that_cannot_be_read_is_tried_again_only_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, opened = tmp_path / "metrics.parquet", list[object]()
    path.write_bytes(b"PAR1" + b"x" * 100)
    log, real = MetricLog(tmp_path), pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda file: (opened.append(file), real(file))[1])
    for _ in range(3):
        log.refresh()
        assert log.damage is not None
    assert len(opened) <= 1
    pq.write_table(pa.table({"step": [1.0]}), path)
    log.refresh()
    assert log.damage is None and log.names == ["step"]


def test_a_file_that_the_system_refuses_once_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pq.write_table(pa.table({"step": [1.0]}), tmp_path / "metrics.parquet")
    log, real = MetricLog(tmp_path), Path.open

    def refused(*_: object, **__: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", refused)
    log.refresh()
    assert log.damage is not None and "Too many open files" in log.damage
    monkeypatch.setattr(Path, "open", real)
    log.refresh()
    assert log.damage is None and log.names == ["step"]


def test_repeated_damage_reports_keep_no_more_frames(tmp_path: Path):
    (tmp_path / "metrics.parquet").write_bytes(b"PAR1" + b"x" * 100)
    table, frames = FollowedTable(tmp_path, "metrics"), list[int]()
    for _ in range(4):
        with pytest.raises(pa.ArrowException) as told:
            table.news()
        frames.append(len(list(traceback.walk_tb(told.value.__traceback__))))
    assert frames[1] == frames[2] == frames[3]


def test_the_line_of_a_finished_run_is_recomputed_only_when_its_files_change(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "one", tmp_path / "one")
    reader = Catalogue(tmp_path).readers["one"]
    first = reader.summary
    assert reader.summary is first and first["status"] == "done"
    with (tmp_path / "one" / "alerts.jsonl").open("a") as file:
        file.write("\n")
    assert reader.summary is not first


def lanes(
    *calls: tuple[str, str, float, float], graphs: dict | None = None, pools: dict | None = None
) -> _Lanes:
    log = CallLog.of_rows(
        {**CALL, "group": group, "node": node, "start_s": start, "end_s": end}
        for group, node, start, end in calls
    )
    return _Lanes(log, graphs or {}, {"placement": pools or {}})


def test_a_stretch_until_the_end_of_a_step_as_a_page_knows_it_has_that_step():
    found = lanes(("actor", "actor.update", 0.0, 5.3000004))
    assert found.page(0.0, 5.3)["steps"] == [{"step": 1, "end_s": 5.3}]
    shorter = lanes(("actor", "actor.update", 0.0, 5.2999996)).page(steps=(1, 1))
    assert (shorter["start_s"], shorter["end_s"]) == (0.0, 5.2999996), "exactly"
    assert shorter["steps"] == [{"step": 1, "end_s": 5.3}]


def test_idle_time_has_its_reason():
    after = {
        "train": {
            "nodes": [{"name": "update", "after": ["generate"]}, {"name": "generate", "after": []}]
        }
    }
    found = lanes(("rollout", "generate", 0, 4), ("actor", "update", 4, 6), graphs=after).page(0, 6)
    by_group = {lane["group"]: lane for lane in found["lanes"]}
    assert [(gap["reason"], gap["text"]) for gap in by_group["actor"]["gaps"]] == [
        ("rows", "update waits for rows of generate on rollout (8 rows)")
    ]
    assert by_group["rollout"]["busy_share"] == pytest.approx(2 / 3, abs=1e-3)
    waits = lanes(("actor", "publish_weights", 0, 2), ("rollout", "receive_weights", 2, 3)).page(0, 3)
    assert waits["lanes"][1]["gaps"][0]["reason"] == "weights"
    disk = lanes(("critic", "save_checkpoint", 0, 2), ("actor", "update", 2, 3)).page(0, 3)
    assert disk["lanes"][1]["gaps"][0]["reason"] == "disk"
    shared = lanes(
        ("critic", "values", 0, 2),
        ("actor", "logprobs", 2, 3),
        pools={n: {"pool": "gpus"} for n in ("actor", "critic")},
    )
    assert shared.page(0, 3)["lanes"][1]["gaps"][0]["reason"] == "device"


def test_ranks_have_lanes_below_their_group_and_say_which_other_they_waited_for():
    by_rank = [{"rank": 0, "end_s": 1.0, "worker_s": 0.5}, {"rank": 1, "end_s": 3.0, "worker_s": 2.5}]
    generate = {
        **CALL,
        "group": "rollout",
        "node": "rollout.generate",
        "start_s": 0.0,
        "end_s": 3.0,
        "by_rank": by_rank,
    }
    update = {**CALL, "start_s": 3.0, "end_s": 4.0}
    log = CallLog.of_rows([update, generate])
    placement = {"placement": {"rollout": {"ranks": 2}, "actor": {"ranks": 1}}}
    graphs = {"train": {"nodes": [{"name": "actor.update", "after": ["rollout.generate"]}]}}
    found = _Lanes(log, graphs, placement).page(0, 4, unfolded=["rollout"])
    assert found["ranks"] == {"rollout": 2}
    assert [lane["lane"] for lane in found["lanes"]] == ["actor", "rollout", "rollout[0]", "rollout[1]"]
    first, second = found["lanes"][2:]
    assert [bar[:2] for bar in first["calls"]] == [[0.5, 1.0]] and [
        bar[:2] for bar in second["calls"]
    ] == [[0.5, 3.0]]
    assert first["busy_share"] == 0.125 and second["busy_share"] == 0.625
    said = "finished its part of rollout.generate; rollout[1] finished 2 s later"
    assert said in [gap["text"] for gap in first["gaps"]] and all(
        said != gap["text"] for gap in second["gaps"]
    )
    [waits] = found["lanes"][0]["gaps"]
    assert (
        waits["text"]
        == "actor.update waits for rows of rollout.generate (8 rows, rollout[1] was the last)"
    )
    assert [lane["lane"] for lane in _Lanes(log, graphs, placement).page(0, 4)["lanes"]] == [
        "actor",
        "rollout",
    ]


def test_weights_and_checkpoints_have_separate_lanes_and_explain_the_critical_path():
    found = lanes(
        ("actor", "actor.update", 0.0, 1.0),
        ("actor", "publish_weights", 1.0, 1.5),
        ("rollout", "receive_weights", 1.4, 2.0),
        ("actor", "save_checkpoint", 2.0, 2.5),
        ("actor", "checkpoint_written", 5.0, 5.0),
    ).page(0, 5)
    by_name = {lane["lane"]: lane for lane in found["lanes"]}
    assert [bar[:2] for bar in by_name["weights"]["calls"]] == [[1.0, 1.5], [1.4, 2.0]]
    assert [bar[:2] for bar in by_name["checkpoints"]["calls"]] == [[2.0, 5.0]], (
        "until it is on the disk"
    )
    assert by_name["checkpoints"]["kind"] == "checkpoint" and by_name["weights"]["kind"] == "weights"
    waiting = [part["text"] for part in found["critical"] if part["node"] is None]
    assert waiting == ["the driver", "a checkpoint on its way to the disk"]


def test_the_critical_path_of_a_step_has_the_calls_it_waited_for():
    found = lanes(
        ("rollout", "generate", 0, 4), ("reward", "score", 1, 3), ("actor", "update", 4.5, 6)
    ).critical(1)
    assert [(part["node"], part["start_s"], part["end_s"]) for part in found] == [
        ("generate", 0, 4),
        (None, 4, 4.5),
        ("update", 4.5, 6),
    ]


def test_the_critical_path_includes_a_call_whose_rows_were_taken_during_it():
    after = {
        "train": {
            "nodes": [{"name": "update", "after": ["generate"]}, {"name": "generate", "after": []}]
        }
    }
    calls = (
        ("rollout", "generate", 0, 4),
        ("recorder", "recorder.record", 0, 2.5),
        ("actor", "update", 3, 6),
    )
    assert [
        (part["node"], part["start_s"], part["end_s"])
        for part in lanes(*calls, graphs=after).critical(1)
    ] == [
        ("generate", 0, 3),
        ("update", 3, 6),
    ]


def test_many_calls_are_shares_of_time():
    found = lanes(*(("actor", "update", k, k + 0.5) for k in range(2000))).page(0, 2000, 300)
    [lane] = found["lanes"]
    assert lane["calls"] == [] and len(lane["bins"]["shares"]) == 100
    assert np.array(lane["bins"]["shares"]) == pytest.approx(0.5, abs=0.01) and lane[
        "busy_share"
    ] == pytest.approx(0.5, abs=1e-3)


def test_names_of_runs_are_their_places_below_the_folder(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "one", tmp_path / "jobs" / "a job" / "one")
    assert list(Catalogue(tmp_path).readers) == ["jobs/a job/one"]
    single = Catalogue(tmp_path / "jobs" / "a job" / "one")
    assert single.single and list(single.readers) == ["one"]


def test_characters_of_several_tokens_are_shown_whole():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    from weft.dataflow.prompts.tokenizer import Tokenizer

    vocabulary = {c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    ids = backend.encode("a€b").ids
    assert token_texts(Tokenizer(backend), ids) == ["a", "€", "", "", "b"]
    assert token_texts(None, [7]) == ["⟨7⟩"]
