"""Modules of the pages: number formats, differences, smoothing, layout, and escaping."""

from collections.abc import Callable
from typing import Any

import pytest
from looking import Look

pytestmark = [pytest.mark.browser, pytest.mark.thorough]


@pytest.fixture(scope="module")
def ask(modules: Look) -> Callable[[str, str], Any]:
    """Evaluates an expression with the exports of a module."""

    def evaluate(module: str, expression: str) -> Any:
        return modules.page.evaluate(f"import('/static/{module}.js').then(m => {expression})")

    return evaluate


def test_numbers_are_written_as_people_read_them(ask):
    written = ask("format", "[12140, 0.7384, 9.1e-7, -0.5, 0, null, 1/0].map(m.number)")
    assert written == ["12,140", "0.738", "9.1e-7", "−0.5", "0", "–", "∞"]
    times = ask("format", "[0.00031, 0.041, 41, 185, 6120, 187200].map(m.duration)")
    assert times == ["310 µs", "41 ms", "41 s", "3 min 5 s", "1 h 42 min", "2 d 4 h"]
    assert ask("format", "[m.clock(8950, 10), m.clock(59.99, 1), m.clock(41.25, 0.01)]") == [
        "2:29:10",
        "1:00",
        "0:41.25",
    ]
    assert ask("format", "[16.4e9, 412e6, 88, null].map(m.bytes)") == ["16.4 GB", "412 MB", "88 B", "–"]
    assert ask("format", "[0.48, 0.004, 1].map(m.percent)") == ["48 %", "0.4 %", "100 %"]


def test_the_difference_of_two_responses_is_the_shortest(ask):
    found = ask("diff", "m.difference([...'abcde'], [...'abxde'])")
    assert found == [["same", ["a", "b"]], ["gone", ["c"]], ["new", ["x"]], ["same", ["d", "e"]]]
    assert ask("diff", "m.difference([], ['a'])") == [["new", ["a"]]]
    assert ask("diff", "m.difference([...'xay'], [...'bab']).filter(([kind]) => kind === 'same')") == [
        ["same", ["a"]]
    ]


def test_a_stretch_between_two_steps_is_the_step_that_is_nearest(ask):
    found = ask("zoom", "['3.2~3.8', '3.2~5.8', '4~4', ''].map(x => m.stepsOf({x}))")
    assert found[:3] == [[4, 4], [4, 5], [4, 4]] and not found[3]
    assert ask("zoom", "m.stepsOf({x: '3.2~5.8', axis: 'time_s'})") is None


def test_labels_of_an_axis_all_differ(ask):
    labels = ask("format", "m.axisLabels([0.9995, 1, 1.0005])")
    assert labels == ["0.9995", "1.0000", "1.0005"]
    assert ask("format", "m.axisLabels([0, 0.5, 1])") == ["0", "0.5", "1"]
    assert ask("format", "m.axisLabels([0.985, 0.99, 0.995], m.percent)") == [
        "98.5 %",
        "99.0 %",
        "99.5 %",
    ]
    assert ask("format", "m.axisLabels([12000.1, 12000.2], m.number)") == ["12,000.1", "12,000.2"]
    assert ask("format", "m.axisLabels([null, 1], m.number)") == ["", "1"]


def test_no_two_nodes_share_a_colour(ask):
    nodes = [f"node_{number}" for number in range(20)]
    shades = ask("lanes", f"m.shadesOf({nodes})")
    assert len(set(shades)) == len(nodes)
    own = ask("lanes", "Object.values(m.OWN_WORK)")
    assert not set(own) & set(shades)


def test_a_smoothed_curve_does_not_lag_and_ends_at_the_measured_values(ask):
    assert ask("smooth", "m.smooth([1, 1, null, 1], 1)") == [1, 1, None, 1]
    rises = "Array.from({length: 300}, (_, step) => Math.min(1, step / 60))"
    smoothed = ask("smooth", f"m.smooth({rises}, 0.2)")
    assert smoothed[0] == 0 and smoothed[-1] == 1
    assert smoothed[30] == pytest.approx(0.5) and smoothed[66] == pytest.approx(1)
    assert ask("smooth", "m.smooth([0, 4, 0, 4, 0, 4, 0, 4, 0, 4], 1)")[4] == pytest.approx(2, abs=0.5)
    assert ask("smooth", "m.smooth([0, 1], 0)") == [0, 1]


def test_runs_are_averaged_where_they_have_values(ask):
    both = ask("smooth", "m.together([{x: [0, 2], y: [0, 2]}, {x: [0, 1, 2], y: [2, 1, 4]}])")
    assert both["x"] == [0, 1, 2] and both["mean"] == [1, 1, 3]
    assert both["high"] == [pytest.approx(1 + 2**0.5), 1, pytest.approx(3 + 2**0.5)]


def test_each_node_comes_after_all_its_inputs(ask):
    size = "{width: 10, height: 5, gapAlong: 2, gapAcross: 1}"
    edges = "[['a', 'b'], ['a', 'c'], ['b', 'd'], ['c', 'd'], ['a', 'd']]"
    found = ask("graph_layout", f"m.layout(['a', 'b', 'c', 'd'], {edges}, {size})")
    assert [found["places"][name]["x"] for name in "abcd"] == [0, 12, 12, 24]
    assert (found["width"], found["height"]) == (34, 11)
    assert (
        ask("graph_layout", f"m.layout(['a', 'b'], [['a', 'b'], ['b', 'a']], {size}).places.b.x") == 12
    )


def test_signs_that_hide_something_are_named(ask):
    shown = ask("text", "m.visible('a\\u001b[0m\\u202eb\\n\\t').map(part => part.textContent ?? part)")
    assert shown == ["a", "ESC", "[0m", "RLO", "b\n\t"]
    assert ask("text", "m.line('one\\ntwo \\u0000' + 'x'.repeat(300), 12)") == "one two ‹NUL›xxx…"
