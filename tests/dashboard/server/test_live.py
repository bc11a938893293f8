"""A live run in a separate dashboard, and its export to one file."""

import asyncio
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import recorded_runs  # pyright: ignore[reportMissingImports]
from served import TOKEN, client_of  # pyright: ignore[reportMissingImports]

from weft.__main__ import main
from weft.controllers.reports import dashboard_process
from weft.dashboard.reading.catalogue import Catalogue
from weft.dashboard.server.app import new_app
from weft.dashboard.server.export import address, ask, linked
from weft.dashboard.server.safety import Access
from weft.dataflow.errors import UserError
from weft.dataflow.runs.files import ALERTS


def until(condition, what: str, seconds: float = 20.0):
    """Poll a condition, and return its first true value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.02)
    return found


@pytest.mark.thorough
def test_a_live_run_can_be_followed_stopped_and_asked_for_its_stack(tmp_path: Path):
    run = recorded_runs.Live(tmp_path / "runs", "live", every=1000)
    client = client_of(tmp_path / "runs")
    try:
        said = until(
            lambda: (s := client.get("/api/run?run=live").json())["step"] > 1 and s,
            "two steps on the disk",
        )
        assert said["status"] == "running" and said["steps"] == 100_000 and said["left_s"] > 0

        def nodes() -> dict:
            graph = client.get("/api/graph?run=live").json()
            return {
                node["name"]: node
                for node in graph["nodes"]
                if graph["live"] and node["graph"] == "train"
            }

        until(lambda: (found := nodes()) and found["rollout.generate"]["rate_out"], "rates")
        assert nodes()["actor.update"]["done"] > 0
        step = client.get("/api/curves?runs=live&names=step").json()["series"][0]["x"][-1]
        until(
            lambda: client.get("/api/curves?runs=live&names=step").json()["series"][0]["x"][-1] > step,
            "another step",
        )
        header = {"x-weft-stop": "yes"}
        wrong = client.post("/api/stacks", json={"run": "live", "worker": "nobody[0]"}, headers=header)
        assert wrong.status_code == 400 and "there is no worker 'nobody[0]'" in wrong.json()["message"]
        assert client.post(
            "/api/stacks", json={"run": "live", "worker": "actor[0]"}, headers=header
        ).json() == {"asked": True}

        def stack():
            workers = client.get("/api/workers?run=live").json()["workers"]
            return next(one for one in workers if one["rank"] == "actor[0]")["stack"]

        assert "threading.py" in until(stack, "a stack") or "run.py" in stack()
        assert client.post("/api/stop", json={"run": "live"}, headers=header).json() == {"asked": True}
    finally:
        if not (run.path / "stop.json").exists():
            main(["stop", str(run.path)])
        assert run.join() == 0
    assert client.get("/api/run?run=live").json()["status"] == "stopped"
    assert not client.get("/api/graph?run=live").json()["live"]


def test_a_page_hears_of_a_change_right_after_its_hello(runs: Path, tmp_path: Path):
    run = shutil.copytree(runs / "one", tmp_path / "runs" / "one")
    app = new_app(Catalogue(tmp_path / "runs"), Access(TOKEN))
    heard: list[bytes] = []

    async def follow() -> None:
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            heard.append(message.get("body", b""))
            if b"hello" in heard[-1]:
                with (run / ALERTS).open("a") as file:
                    file.write("\n")
            elif b"changed" in heard[-1]:
                gone.set()

        header = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/api/events", "headers": header}
        scope |= {"query_string": b"", "root_path": "", "asgi": {"version": "3.0"}}
        await asyncio.wait_for(app(scope, receive, send), 60)

    asyncio.run(follow())
    assert b'{"run": "one", "parts": ["alerts"]}' in heard[-1]


def test_a_driver_starts_a_dashboard_that_lives_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(dashboard_process, "IDLE_S", 0.2)  # waited out, when the run is over
    driver = recorded_runs.driver(tmp_path / "runs", "own", steps=2, progress="plain", dashboard=True)
    with driver:
        said = capsys.readouterr().out
        [address] = re.findall(
            r"^dashboard: (http://127\.0\.0\.1:\d+/\?token=\S+)#/curves\?run=own$", said, re.MULTILINE
        )
        with httpx.Client(base_url=address.partition("?")[0], timeout=30, trust_env=False) as browser:
            assert browser.get("/api/runs").status_code == 401
            assert browser.get(f"/?{address.partition('?')[2]}").status_code == 200
            with browser.stream("GET", "/api/events") as stream:
                lines = stream.iter_lines()
                assert next(line for line in lines if line.startswith("event:")) == "event: hello"
                driver.run()
                by = time.monotonic() + 60  # beats keep the stream alive
                told = next(line for line in lines if '"metrics"' in line or time.monotonic() > by)
                assert told.startswith('data: {"run": "own"')
            assert browser.get("/api/run?run=own").json()["step"] == 2
    log = driver.directory.path / "logs" / dashboard_process.LOG
    assert log.read_text() == "", "it says nothing that nobody would read"


def test_a_dashboard_that_cannot_start_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(run: Path) -> str:
        raise OSError("no port is free")

    monkeypatch.setattr("weft.controllers.driver.start_dashboard", refuse)
    with recorded_runs.driver(tmp_path / "runs", "own", steps=1, dashboard=True) as driver:
        driver.run()
    alerts = (tmp_path / "runs" / "own" / "alerts.jsonl").read_text()
    assert "the dashboard cannot be started: no port is free" in alerts


# One file


def test_a_run_is_exported_as_one_file(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "one.html"
    assert main(["dashboard", str(runs / "one"), "--export", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"] == 18
    text = file.read_text()
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[0]
    assert (
        "unsafe" not in policy
        and "'self'" not in policy
        and "http" not in policy
        and policy.count("sha256-") >= 4
    )
    assert not re.search(
        r'(src|href)="(?!data:|#)', re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    ), "it needs no other file"
    data = json.loads(
        re.findall(r'<script type="application/json" id="exported">(.*?)</script>', text, re.DOTALL)[0]
    )
    assert data["/api/run?run=one"]["status"] == "done" and "/api/timeline?run=one&width=1200" in data
    assert len([each for each in data if each.startswith("/api/group?")]) == 18
    curves = [json.dumps(answer) for each, answer in data.items() if each.startswith("/api/curves?")]
    assert len(curves) == 3 and "reward/mean" in curves[0]
    assert main(["dashboard", str(runs), "--export", str(file)]) == 2
    assert "an export takes one run" in capsys.readouterr().err


def test_modules_are_linked_in_their_order(tmp_path: Path):
    (tmp_path / "low.js").write_text("export const one = 1;\nexport function two() { return 2; }\n")
    (tmp_path / "app.js").write_text(
        'import { one, two as deux } from "./low.js";\nconsole.log(one + deux());\n'
    )
    text = linked(tmp_path)
    assert (
        text.index("module_low =") < text.index("module_app =")
        and "const { one, two: deux } = module_low;" in text
    )
    assert "export" not in text and "import" not in text
    (tmp_path / "app.js").write_text("export default 3;\n")
    with pytest.raises(UserError, match=r"app\.js cannot be exported: it has 'export default 3;'"):
        linked(tmp_path)
    (tmp_path / "app.js").write_text('import { a } from "./low.js";\n')
    (tmp_path / "low.js").write_text('import { b } from "./app.js";\n')
    with pytest.raises(UserError, match=r"in a cycle: app\.js -> low\.js -> app\.js"):
        linked(tmp_path)


def test_the_command_prints_its_address_and_refuses_missing_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["dashboard", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["dashboard", str(tmp_path), "--host", "192.0.2.1"]) == 2
    assert "cannot be listened on" in capsys.readouterr().err


def test_an_export_may_name_thousands_of_metrics(runs: Path):
    names = ",".join([*(f"a_metric_with_quite_a_long_name/{i}" for i in range(3000)), "reward/mean"])
    app = new_app(Catalogue(runs / "one"), Access(""))
    answer = asyncio.run(ask(app, address("curves", {"runs": "one", "names": names})))
    assert "reward/mean" in json.dumps(answer)
