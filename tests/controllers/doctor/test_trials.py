"""Trials of the doctor: each has its process, deadline and record; the report has no secrets."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft.__main__ import main
from weft.commands.doctor import _resolve_model
from weft.controllers.doctor import hardware
from weft.controllers.doctor.hardware import HARDWARE
from weft.controllers.doctor.operations import OPERATIONS
from weft.controllers.doctor.trials import (
    Case,
    Trial,
    earlier_checks,
    run_trial,
    run_trials,
    table_of,
    write_report,
)
from weft.controllers.node_layout import assumed_machine
from weft.controllers.prechecks.machine import host_name
from weft.dataflow.errors import UserError

sys.path.append(str(Path(__file__).parent))
import doctored

TRIALS = (*HARDWARE, *OPERATIONS)


def check(run: Callable[..., object], deadline_s: float = 60, **more: object) -> Trial:
    return Trial(run.__name__, "it passes", "repair it", run, deadline_s, **more)  # pyright: ignore[reportArgumentType]


def test_a_check_that_fails_or_crashes_stops_no_other(capsys: pytest.CaptureFixture[str]):
    skipped = replace(check(doctored.hangs), name="skips", only_on="gpu")
    tried = [check(doctored.fails), check(doctored.crashes), skipped, check(doctored.passes)]
    records = run_trials(False, tried, model="tiny")
    assert [record.outcome for record in records] == ["failed", "failed", "skipped", "passed"]
    assert records[0].why == "AssertionError: two is not three"
    assert "in fails" in records[0].trace and records[0].fix == "repair it"
    assert records[1].why == "its process ended with exit code 7, in the phase 'starting'"
    assert records[1].command == "weft doctor --try --only 2 --model tiny"
    assert records[2].why == "it needs a GPU"
    assert records[3].figures == {"gpu": "False", "model": "tiny"}
    assert records[3].phases.keys() == {"counting"} and records[3].fix == ""
    said = capsys.readouterr()
    names = ["1 fails", "2 crashes", "4 passes"]
    assert (said.out, said.err.split(" ...\n")[:-1]) == ("", names)
    table = table_of(records)
    assert "-> repair it" in table and "again: weft doctor --try --only 2" in table
    assert "expected: it passes" in table and "time: counting" in table


def test_checks_after_a_failed_one_that_they_need_are_skipped():
    needing = replace(check(doctored.passes), name="needing", needs=("fails",))
    tried = [check(doctored.fails), needing, check(doctored.passes)]
    saved: list[int] = []
    records = run_trials(False, tried, save=lambda records: saved.append(len(records)))
    assert [(r.outcome, r.why) for r in records[1:]] == [("skipped", "check 1 failed"), ("passed", "")]
    assert saved == [1, 2, 3]
    assert [r.number for r in run_trials(False, tried, only=[3])] == [3]
    found = run_trials(True, tried, only=[2])
    assert [r.outcome for r in found] == ["failed", "skipped"], "with GPUs, check 1 always runs"
    with pytest.raises(UserError, match="--only 4: the checks have the numbers 1 to 3"):
        run_trials(False, tried, only=[4])


def test_only_checks_that_use_vllm_need_its_warm_up():
    needing = [n for n, trial in enumerate(TRIALS, start=1) if "warm-up" in trial.needs]
    assert needing == [8, 9, 10, 11]
    assert all("driver" in trial.needs for trial in TRIALS[1:])


def test_a_failure_can_have_its_own_fix():
    record = run_trial(check(doctored.fails_with_a_fix), False)
    assert record.why == "AssertionError: torch is for CPUs" and record.fix == "install another torch"


@pytest.mark.thorough
def test_a_hanging_check_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCTORED", str(tmp_path / "child"))
    for deadline_s in (3, 12, 60):  # retry until the check has had time to begin
        record = run_trial(check(doctored.hangs, deadline_s), False)
        assert record.why.startswith(f"it did not end in {deadline_s} s")
        if (tmp_path / "child").exists():
            break
    assert record.why.endswith("in the phase 'waiting'") and record.phases["waiting"] > 0
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    deadline = time.monotonic() + 20
    while child.exists() and not child.read_text().split(") ")[1].startswith(
        "Z"
    ):  # signals take time on a busy machine
        assert time.monotonic() < deadline, f"the child of the check lives on: {child.read_text()}"
        time.sleep(0.05)


def test_the_error_of_a_rank_is_reported_while_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hardware, "_collect", doctored.first_rank_fails)
    with pytest.raises(AssertionError, match="rank 0: a wrong sum"):
        hardware.collectives(Case(tmp_path, False))


def test_a_report_has_no_secrets_and_no_names_of_hosts_and_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setenv("RAY_ADDRESS", "ray-head.corp:6379")
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7.corp")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    finding = replace(host_name(), about="network", name="host name")
    assert "node-7.corp" in finding.found
    record = replace(
        run_trial(check(doctored.fails), False),
        why="node-7: hf_0123456789abcdef refused at ray-head.corp:6379",
        trace='File "/home/ann/weft/x.py" of ann, not of joann; /home/bob/y at 10.7.8.9:80, 127.0.0.1:80, '
        "ray-head.corp",
    )
    write_report(tmp_path / "report.json", [finding], [record])
    text = (tmp_path / "report.json").read_text()
    assert not re.search("hf_0|corp|node-7|/home/ann|bob| ann", text)
    [written] = json.loads(text)["checks"]
    assert written["why"] == "HOST: [value of HF_TOKEN] refused at CLUSTER"
    assert written["trace"] == (
        'File "~/weft/x.py" of USER, not of joann; /home/USER/y at ADDRESS:80, 127.0.0.1:80, CLUSTER'
    )
    assert written["command"] == "weft doctor --try --only 1" and written["fix"] == "repair it"


def test_without_cuda_the_command_gives_torchs_reason_and_writes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["doctor", "--gpu"]) == 1
    said = capsys.readouterr().out
    assert "failed   1 driver" in said and "again: weft doctor --gpu --only 1" in said
    first, *others = json.loads((tmp_path / "weft-doctor.json").read_text())["checks"]
    assert "docs/gpu.md" in first["why"] and first["outcome"] == "failed"
    assert {(one["outcome"], one["why"]) for one in others} == {("skipped", "check 1 failed")}
    assert [one["number"] for one in others] == [*range(2, len(TRIALS) + 1)]
    assert main(["doctor", "--only", "2"]) == 2
    assert main(["doctor", "--gpu", "--only", "4"]) == 1
    checks = json.loads((tmp_path / "weft-doctor.json").read_text())["checks"]
    assert [one["number"] for one in checks] == [*range(1, len(TRIALS) + 1)]


def test_the_driver_check_says_to_install_torch_if_it_is_a_build_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, notes in ((None, [hardware.INSTALL]), ("13.0", [])):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(AssertionError) as failed:
            hardware.driver(Case(tmp_path, True))
        assert getattr(failed.value, "__notes__", []) == notes


def test_a_report_keeps_the_other_checks_of_an_earlier_one(tmp_path: Path):
    file = tmp_path / "report.json"
    assert earlier_checks(file) == {}
    first, second = (run_trial(check(doctored.passes), False, number=number) for number in (1, 2))
    write_report(file, [], [first, second])
    write_report(file, [], [replace(second, outcome="failed")], earlier_checks(file))
    checks = json.loads(file.read_text())["checks"]
    assert [(one["number"], one["outcome"]) for one in checks] == [(1, "passed"), (2, "failed")]
    for damaged in ("{", "[]", '{"checks": [1]}'):
        file.write_text(damaged)
        assert earlier_checks(file) == {}


def test_wrong_folders_are_named_before_any_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (["--model", "./none"], "--model ./none: no such folder"),
        (["--report", "none/r.json"], "--report none/r.json: no such folder 'none'; create it"),
        (["--report", "."], "--report .: this is a folder; name a file"),
    ):
        assert main(["doctor", "--try", *words]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *given: False)
    assert main(["doctor", "--try", "--report", "r.json"]) == 2
    assert "--report r.json: cannot write to folder '.'" in capsys.readouterr().err


def test_the_model_of_a_relative_folder_is_found_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    found = [_resolve_model(model) for model in ("mine", "./mine", "~/mine")]
    assert found == [str(tmp_path / "mine")] * 3
    assert [_resolve_model(model) for model in ("Qwen/Qwen3-8B", "")] == ["Qwen/Qwen3-8B", ""]


def machine(root: Path, cpus: int, memory_gib: int) -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: {memory_gib << 20} kB\nMemAvailable: {memory_gib << 20} kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": f"{cpus}00000 100000\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    return root


def test_a_machine_with_too_few_cpus_or_too_little_memory_for_its_gpus_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    case = Case(tmp_path, True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    with assumed_machine(8, 80 << 30):
        with pytest.raises(AssertionError, match="12 CPUs for 8 GPUs"):
            hardware.resources(case, machine(tmp_path, 12, 512))
        with pytest.raises(AssertionError, match="32 GiB of host memory for 8 GPUs"):
            hardware.resources(case, machine(tmp_path, 32, 32))
        figures = hardware.resources(case, machine(tmp_path, 32, 512))
    assert (figures["CPUs"], figures["GiB of host memory"]) == (32, 512)


def test_every_check_is_documented_with_its_number():
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([a-zA-Z -]+?) \|", page, re.M)
    assert rows == [(str(number), trial.name) for number, trial in enumerate(TRIALS, start=1)]
    assert all(trial.expected and trial.fix and trial.deadline_s >= 60 for trial in TRIALS)


@pytest.mark.slow
def test_the_checks_pass_on_a_cpu():
    records = run_trials(False, TRIALS)
    outcomes = {record.name: record.outcome for record in records}
    assert {name for name, outcome in outcomes.items() if outcome == "skipped"} == {"warm-up", "sleep"}
    assert set(outcomes.values()) == {"passed", "skipped"}, table_of(records)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ or os.environ["CUDA_VISIBLE_DEVICES"] != ""
