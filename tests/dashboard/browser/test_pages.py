"""Every page for every kind of run, light and dark, wide and narrow: shown, quiet, and fitting."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
from forked import program
from looking import PAGES
from serving import Serving
from wicked import NAME, RAW

from weft.dashboard.server.export import export_run

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
LARGE_RUN = Path(__file__).resolve().parents[3] / "benchmarks" / "dashboard" / "large_run.py"
RUNS = ("first", "killed", "nothing", "live")


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """The name of a run; the live one works meanwhile."""
    return request.getfixturevalue("live") if request.param == "live" else request.param


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_every_page_of_a_run_is_there_and_fits(look, run: str):
    window = look()
    for page in PAGES:
        main = window.show(page, run=run)
        assert main.get_attribute("data-shows") != "problem", main.inner_text()
        assert main.inner_text().strip()
        assert window.too_wide() <= 0, f"{page} of {run}"


@pytest.mark.parametrize("run", ["first", "live"], indirect=True)
def test_every_page_fits_a_phone_in_the_dark(look, run: str):
    window = look(width=390, dark=True)
    background = window.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(15, 19, 24)"
    for page in ("runs", *PAGES):
        main = window.show(page, run=run)
        assert main.get_attribute("data-shows") != "problem", main.inner_text()
        assert window.too_wide() <= 0, f"{page} of {run}"


def test_two_runs_are_laid_over_one_another_and_compared(look):
    window = look()
    main = window.show("curves", run="first", runs="killed", band="1", log="1", x="2~8")
    legend = main.locator(".legend").inner_text()
    assert "first" in legend and "killed" in legend
    assert main.locator("canvas").count() > 8
    assert "Settings" in window.show("compare", run="first", **{"with": "killed"}).inner_text()


def altered(folder: Path, name: str, **files: Callable[[Any], Any]) -> str:
    """Copy the run `first`, change its JSON files with functions, and return the copy's name."""
    run = copytree(folder / "first", folder / name)
    for file, change in files.items():
        path = run / f"{file}.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return name


@pytest.mark.parametrize("width", [1280, 390])
def test_a_graph_of_many_layers_stays_in_its_frame(look, folder: Path, width: int):
    def lengthen(graphs: Any) -> Any:
        nodes = graphs["train"]["nodes"]
        for number in range(6):
            nodes.insert(
                -1, {**nodes[1], "name": f"reward.stage_{number}", "after": [nodes[-2]["name"]]}
            )
        nodes[-1]["after"] = [nodes[-2]["name"]]
        return graphs

    name = altered(folder, f"layers {width}", graph=lengthen)
    window = look(width=width)
    window.show("graph", run=name)
    assert window.page.locator(".map").first.locator(".node").count() == 12
    frame = window.page.evaluate(
        "(map => [map.scrollWidth, map.clientWidth])(document.querySelector('.map'))"
    )
    assert frame[0] <= frame[1]
    rmtree(folder / name)


def test_two_runs_with_other_graphs_are_compared_node_by_node(look, folder: Path):
    def change(config: Any) -> Any:
        config["graphs"]["train"] = [
            line for line in config["graphs"]["train"] if "old_logprobs" not in line
        ]
        config["graphs"]["train"].insert(2, "  1. reward.filter  [filter; train; takes rows]")
        return config

    name = altered(folder, "other graph", config=change)
    text = look().show("compare", run="first", **{"with": name}).inner_text()
    assert "graphs.train.actor.logprobs.writes" in text and "graphs.train.reward.filter" in text
    assert '["' not in text and '{"' not in text
    rmtree(folder / name)


def test_the_last_alert_of_a_run_is_read_whole_in_the_list(look, folder: Path):
    name = altered(folder, "alerted")
    said = "entropy fell to 0.01 of its first value; raise the temperature or add an entropy term " * 2
    alert = {"time": 1763851200.2, "step": 3, "name": "entropy", "text": said, "ends": False}
    (folder / name / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    for width in (1280, 390):
        window = look(width=width)
        window.show("runs")
        note = window.page.locator("tr.note", has_text="entropy fell")
        box = note.locator("div").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    rmtree(folder / name)


def test_a_shared_link_shows_the_same_page(look):
    window = look()
    window.show("samples", run="first")
    window.page.keyboard.press("j")
    window.page.wait_for_function("location.hash.includes('group=')")
    window.shown("samples")
    seen = window.page.locator(".detail h2").inner_text()
    other = look()
    other.page.goto("about:blank")
    other.page.goto(window.page.url)
    other.shown("samples")
    assert other.page.locator(".detail h2").inner_text() == seen


def test_text_of_a_model_is_text_on_every_page(look):
    window = look()
    for page in ("runs", *PAGES):
        main = window.show(page, run=NAME)
        text = window.page.evaluate("document.body.innerText + document.title")
        assert not set(RAW) & set(text), page
        assert main.locator("img, script, style").count() == 0, page
        assert window.too_wide() <= 0, page
    window.show("samples", run=NAME, filter="step = 41")
    shown = window.page.locator(".detail").inner_text()
    assert "<script>window.harmed=1</script>" in shown
    assert {"ESC", "RLO", "NUL", "ZWSP"} <= set(
        window.page.locator(".detail .control").all_inner_texts()
    )
    assert len(shown) < 1_000_000, "long lines are folded"
    window.show("samples", run=NAME, view="table", filter="step = 41")
    window.show("workers", run=NAME, worker="actor[0]")
    window.show("compare", run=NAME, **{"with": "first"})
    assert window.page.evaluate("window.harmed") is None


def test_an_exported_run_is_looked_at_without_a_server(look, folder: Path, tmp_path: Path):
    export_run(folder / "first", tmp_path / "first.html")
    window = look()
    window.page.goto("about:blank")
    window.page.goto((tmp_path / "first.html").as_uri())
    assert "reward" in window.shown("curves").inner_text()
    for page in PAGES[1:]:
        main = window.show(page, run="first")
        assert main.get_attribute("data-shows") != "problem", main.inner_text()


def test_a_run_removed_during_a_visit_is_reported_as_gone(look, folder: Path):
    copytree(folder / "first", folder / "leaving")
    window = look()
    window.show("curves", run="leaving")
    window.forgiven.append("/api/")
    rmtree(folder / "leaving")
    window.page.get_by_text("The run is gone.").wait_for()
    assert "first" in window.page.locator("nav").inner_text()


@pytest.mark.slow
def test_every_page_of_a_run_of_10_000_steps_and_100_000_samples_is_there(look, tmp_path: Path):
    large = program(tmp_path / "made.txt", LARGE_RUN, str(tmp_path / "runs" / "large"))
    large.process.join(900)
    with Serving(tmp_path / "runs") as where:
        window = look(where=where)
        for page in ("runs", *PAGES):
            main = window.show(page, run="large")
            assert main.get_attribute("data-shows") != "problem", main.inner_text()
            assert main.inner_text().strip() and window.too_wide() <= 0, page
        main = window.open("curves", run="large")
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        assert window.page.evaluate(paint) <= 1000 and main.locator("canvas").count() > 10
