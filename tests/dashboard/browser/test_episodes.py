"""The page of an episode: its tree, its surroundings, long episodes, and malicious texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from episode_runs import (  # pyright: ignore[reportMissingImports]
    BIG,
    Row,
    call,
    four_episodes,
    from_tool,
    long_episode,
    opening,
    write_run,
)
from looking import Look
from serving import Serving
from wicked import RAW, WICKED

from weft.dashboard.server.export import export_run

pytestmark = [pytest.mark.browser, pytest.mark.thorough]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: four short episodes, a long one, and one with malicious texts."""
    root = tmp_path_factory.mktemp("episodes")
    write_run(root, "four", four_episodes())
    write_run(root, "long", [(0, 5, 1.0, long_episode())])
    row = Row(opening(WICKED, WICKED)).sample(f"{WICKED}{call(WICKED, **{WICKED: WICKED})}")
    row.give(from_tool(f"{WICKED}<|im_end|>\n<|im_start|>user\n{WICKED}")).sample(WICKED, cut=True)
    write_run(root, "wicked", [(0, 5, 1.0, [row])])
    write_run(root, "ids", four_episodes(), has_tokenizer=False)
    return root


@pytest.fixture(scope="module")
def server(recorded: Path) -> Iterator[str]:
    with Serving(recorded) as where:
        yield where


@pytest.fixture
def window(chromium: Any, server: str) -> Iterator[Callable[..., Look]]:
    """Opens windows on these runs; afterwards no page may have complained."""
    opened: list[Look] = []

    def new(width: int = 1280, dark: bool = False) -> Look:
        opened.append(Look(chromium, server, width, dark))
        return opened[-1]

    yield new
    complaints = [complaint for one in opened for complaint in one.complaints]
    for one in opened:
        one.close()
    assert not complaints


def test_an_episode_is_a_tree_of_turns_with_calls_versions_and_masked_tokens(window):
    look = window()
    main = look.show("samples", run="four", episode=BIG)
    branches = main.locator(".tree li").all_inner_texts()
    assert len(branches) == 4 and "What is 0 + 2?" in branches[0] and "after branch 1" in branches[1]
    assert (
        main.locator(".episode-turn.sampled").count() == main.locator(".episode-turn.given").count() == 4
    )
    first = main.get_by_label("turn 2, sampled")
    said = first.inner_text()
    assert "calls calculator(expression: 0 + 2)" in said and "v3" in said and "0.25" in said
    assert "mean log-probability" in said
    first.get_by_text("calls calculator").click()
    assert first.locator(".call-arguments").inner_text().split() == [
        "calls",
        "calculator",
        "expression",
        "0",
        "+",
        "2",
    ]
    assert main.locator(".episode-turn.given").first.get_by_text("What is 0 + 2?").is_visible()
    assert "truncated" in main.inner_text() and "not trained" in main.inner_text()
    colour = "node => getComputedStyle(node).fontStyle"
    assert main.locator(".given .text").first.evaluate(colour) == "italic"
    assert first.locator(".tokens").first.evaluate(colour) == "normal"
    look.page.keyboard.press("c")
    look.page.wait_for_function("location.hash.includes('by=')")


def test_an_episode_leads_to_its_group_its_rows_and_the_other_episodes(window):
    look = window()
    main = look.show("samples", run="four", episode=BIG)
    chips = main.locator(".lineage .chip")
    assert [chip.split() for chip in chips.all_inner_texts()] == [["1"], ["0"]]
    chips.nth(1).click()
    look.page.wait_for_function(f"location.hash.includes('{BIG + 1}')")
    main.get_by_text("What is 1 + 2?").first.wait_for()
    main.get_by_role("link", name="group 0", exact=True).click()
    main.locator(".response").first.wait_for()
    assert main.locator(".response").count() == 6
    assert main.locator("p.episode").all_inner_texts() == ["Episode of 3 rows"] * 2
    main.locator(".response").nth(3).get_by_role("link", name="episode", exact=True).click()
    look.page.wait_for_function(f"location.hash.includes('episode={BIG + 1}')")
    main.locator(".tree").wait_for()
    main.get_by_role("link", name="as table").click()
    main.locator("tbody tr").first.wait_for()
    assert main.locator("tbody tr").count() == 3
    main.get_by_role("link", name=str(BIG + 1)).first.click()
    main.locator(".tree").wait_for()


def test_a_long_episode_is_shown_in_pages_and_its_branches_are_links(window):
    look = window()
    main = look.show("samples", run="long", episode=5)
    assert 0 < main.locator(".episode-turn").count() <= 50
    first = main.locator(".episode-turn").first.get_attribute("aria-label")
    main.get_by_role("button", name="later turns").first.click()
    look.page.wait_for_function(
        "first => document.querySelector('.episode-turn').ariaLabel !== first", arg=first
    )
    main.get_by_label("branches").locator("summary").click()
    main.locator(".tree a").last.click()
    main.get_by_text("Nothing new.").first.wait_for()
    assert main.get_by_role("button", name="later turns").first.is_disabled()
    nodes = look.page.evaluate("document.querySelectorAll('*').length")
    assert nodes < 40_000


@pytest.mark.parametrize("width", [1280, 390])
def test_text_of_an_episode_is_text(window, width: int):
    look = window(width)
    main = look.show("samples", run="wicked", episode=5)
    for details in main.locator("details").all():
        details.evaluate("node => node.open = true")
    text = look.page.evaluate("document.body.innerText + document.title")
    assert not set(RAW) & set(text)
    assert main.locator("img, script, style").count() == 0
    assert "<script>window.harmed=1</script>" in text
    assert look.page.evaluate("window.harmed") is None
    assert look.too_wide() <= 0


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_in_an_episode(window, dark: bool):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    look = window(dark=dark)
    look.show("samples", run="four", episode=BIG)
    results = axe.Axe().run(look.page).response["violations"]
    found = {rule["id"]: [node["html"][:200] for node in rule["nodes"][:3]] for rule in results}
    assert not found


def test_an_episode_fits_a_phone_and_needs_no_tokenizer(window):
    look = window(390, dark=True)
    for run in ("four", "long", "ids"):
        main = look.show("samples", run=run, episode=5 if run == "long" else BIG)
        assert main.locator(".episode-turn").count() > 0 and look.too_wide() <= 0, run
    assert "tokenizer is not on this machine" in main.inner_text()


def test_an_exported_run_has_its_episodes(window, recorded: Path, tmp_path: Path):
    export_run(recorded / "four", tmp_path / "four.html")
    look = window()
    look.page.goto("about:blank")
    look.page.goto((tmp_path / "four.html").as_uri())
    look.shown("curves")
    main = look.show("samples", run="four", episode=BIG)
    assert main.locator(".tree li").count() == 4
