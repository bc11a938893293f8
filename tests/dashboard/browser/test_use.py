"""Using the pages: keyboard, assistive technology, a live run, and a dashboard that restarts."""

import re

import pyarrow as pa
import pytest
from looking import PAGES
from serving import Serving

from weft.dataflow.runs.directory import RunDirectory

pytestmark = [pytest.mark.browser, pytest.mark.thorough]

WAITS = re.compile(
    r".+: \d+ of \d+ rows to do; (\d+ leased|waits for .+|ready, not claimed|too old, .+; waits for a larger bound)"
)
"""Remaining work of a node for a group in flight."""
ENDS = re.compile(
    r"group 288 was never issued; groups 0 to \d+ were|group 288 of graph .+\) was finished at byte .+"
)
"""A group that waits for nothing."""


def test_everything_is_reached_by_keys_alone(look):
    window = look()
    press = window.page.keyboard.press
    window.show("runs", sort="run")
    press("j")
    press("Enter")
    window.shown("curves")
    press("l")
    window.page.wait_for_function("location.hash.includes('log=1')")
    press("2")
    window.shown("graph")
    window.page.locator(".node").nth(1).focus()
    press("Enter")
    window.page.get_by_text("Metrics of").wait_for()
    press("3")
    window.shown("timeline")
    press("+")
    window.page.wait_for_function("location.hash.includes('t=')")
    press("4")
    window.shown("samples")
    press("/")
    assert window.page.evaluate("document.activeElement.type") == "search"
    press("Escape")
    press("c")
    window.page.wait_for_function("location.hash.includes('by=')")
    window.page.locator(".tokens").first.focus()
    press("ArrowRight")
    assert "of" in window.page.locator(".figured .tip:not([hidden])").inner_text()
    press("?")
    window.page.locator("dialog[open]").get_by_text("next group").wait_for()
    press("Escape")
    window.page.locator("dialog").wait_for(state="detached")
    press("0")
    window.shown("runs")


def test_the_focus_is_visible_and_tab_reaches_everything(look):
    window = look()
    window.show("runs")
    seen = set()
    for _ in range(30):
        window.page.keyboard.press("Tab")
        seen.add(
            window.page.evaluate(
                "document.activeElement.tagName + '|' + getComputedStyle(document.activeElement).outlineStyle"
            )
        )
    assert {"A|solid", "BUTTON|solid", "INPUT|solid"} <= {kind.replace("auto", "solid") for kind in seen}


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(look, dark: bool):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    window = look(dark=dark)
    found = {}
    for page in ("runs", *PAGES, "compare"):
        window.show(page, run="first", **{"with": "killed"} if page == "compare" else {})
        results = axe.Axe().run(window.page).response["violations"]
        found |= {
            f"{page}: {rule['id']}": [node["html"][:200] for node in rule["nodes"][:3]]
            for rule in results
        }
    assert not found


def test_a_new_step_of_a_live_run_is_on_the_page_at_once_and_nothing_jumps(look, live: str):
    window = look()
    window.show("curves", run=live, smooth=0)  # after 20 steps, a smoothed curve becomes two
    step = window.page.locator(".fact .value").first
    window.page.evaluate("window.kept = document.querySelector('.card canvas'); scrollTo(0, 300)")
    place = window.page.evaluate("scrollY")
    before = step.inner_text()
    window.page.wait_for_function(
        "before => document.querySelector('.fact .value').innerText !== before",
        arg=before,
        timeout=30_000,
    )
    assert place > 0 and window.page.evaluate("window.kept.isConnected && scrollY") == place


def test_a_dashboard_that_dies_and_comes_back_is_found_again(look, folder):
    first = Serving(folder)
    with first as address:
        window = look(where=address)
        window.show("graph", run="first")
    window.forgiven.append("/api/")
    window.page.get_by_text("reconnecting").wait_for()
    assert window.page.locator(".node").count() > 3, "what was read stays"
    with Serving(folder, port=int(address.partition("?")[0].rstrip("/").rpartition(":")[2])):
        window.page.get_by_text("reconnecting").wait_for(state="detached", timeout=30_000)
        window.show("buffer", run="first")


def test_only_a_second_yes_stops_a_run(look, folder, live: str):
    window = look()
    window.show("curves", run=live)
    window.page.get_by_role("button", name="Stop…").click()
    assert window.page.evaluate("document.activeElement.innerText") == "Let it run"
    window.page.keyboard.press("Enter")
    window.page.locator("dialog").wait_for(state="detached")
    assert not list((folder / live).glob("*stop*"))


def test_a_mistake_in_a_filter_is_reported_next_to_it(look):
    window = look()
    window.forgiven.append("/api/groups")
    window.show("samples", run="first", filter="rewrd > 0.5")
    assert "did you mean 'reward'" in window.page.get_by_role("alert").inner_text()
    field = window.page.get_by_label("condition on columns")
    field.fill("reward > 0.5")
    field.press("Enter")
    window.page.wait_for_selector(".entry")


def test_the_timeline_can_jump_to_a_step(look):
    window = look()
    window.show("timeline", run="first", t="0~0.1")
    window.page.get_by_label("show one step").fill("12-13")
    window.page.keyboard.press("Enter")
    window.page.get_by_text("Steps 12 to 13").wait_for()


def test_a_zoom_is_kept_between_pages(look):
    window = look()
    window.show("curves", run="first", x="10~14")
    window.page.keyboard.press("3")
    window.shown("timeline")
    window.page.get_by_text("Steps 10 to 14").wait_for()
    window.page.keyboard.press("4")
    window.shown("samples")
    window.page.get_by_role("button", name="steps 10 to 14").wait_for()
    steps = {
        text.rpartition("step ")[2]
        for text in window.page.locator(".entry small").all_inner_texts()
        if "step" in text
    }
    assert steps <= {"10", "11", "12", "13", "14"} and steps
    window.page.get_by_role("button", name="steps 10 to 14").click()
    window.page.wait_for_function("!location.hash.includes('x=')")


def test_a_conversation_is_shown_as_turns_and_unfolded_turns_stay_open(look, folder):
    run = folder / "talk"
    RunDirectory.create(folder, "talk").close()
    (run / "samples").mkdir(exist_ok=True)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
    said = (
        '<think>easy</think><tool_call>{"name": "calculator"}</tool_call><|im_end|>\n<|im_start|>tool\n'
        + "5" * 400
    )
    said += "<|im_end|>\n<|im_start|>assistant\nIt is 5.<|im_end|>"
    rows = {
        "sample_id": [1],
        "group_id": [0],
        "response_ids": [[1, 2]],
        "response": [said],
        "prompt_messages": [asked],
    }
    table = pa.table(rows)
    with pa.ipc.new_file(str(run / "samples" / "train_000001.1.0.arrow"), table.schema) as writer:
        writer.write_table(table)
    window = look()
    window.show("samples", run="talk")
    turns = window.page.locator(".response .turn")
    assert turns.locator("h4").all_inner_texts() == ["assistant", "tool", "assistant"]
    assert (
        window.page.get_by_text("It is 5.").is_visible()
        and window.page.get_by_text("What is 2 + 3?").is_visible()
    )
    call = window.page.get_by_text("calls calculator")
    assert not window.page.get_by_text('"name": "calculator"').is_visible()
    call.click()
    assert window.page.get_by_text('"name": "calculator"').is_visible()
    window.page.evaluate("dispatchEvent(new Event('theme'))")  # redraw everything
    assert window.page.get_by_text('"name": "calculator"').is_visible()


def test_an_unrecorded_group_shows_the_nodes_it_waits_for(look):
    window = look()
    window.show("samples", run="killed", group="288")  # in flight at the kill, or not issued yet
    window.page.get_by_text("not recorded yet").wait_for()
    first, *waits = window.page.locator(".detail .notice").all_inner_texts()
    if ENDS.fullmatch(first):
        assert not waits
    else:  # from the driver's last report, or from the log
        waits = (
            waits
            if first.startswith("group 288 of graph") and first.endswith("is in flight")
            else [first, *waits]
        )
        assert waits and all(WAITS.fullmatch(line) for line in waits)
