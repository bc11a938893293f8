"""The settings page is generated from the classes and lists every setting with unit and advice."""

import ast
import re
from pathlib import Path

import pytest
from settings_page import FILLED, SECTIONS, Setting, counts, page, settings_of

from weft.controllers.simulation.costs import LinearCost
from weft.dataflow.errors import UserError
from weft.workers.rollout_config import RolloutConfig

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("algorithms", "controllers", "dataflow", "workers")
WHEN = re.compile(r"(^|[.):] )(Raise|Lower|Set|Choose|Give|Change) ")
"""A sentence on when to change a setting begins with one of these verbs."""


def settings() -> list[Setting]:
    return [
        setting for section in SECTIONS for owner in section.owners for setting in settings_of(owner)
    ]


def declared() -> set[str]:
    """Return every `Class.field` of the settings classes in the source."""
    classes: dict[str, tuple[list[str], list[str]]] = {}
    for file in (file for floor in FLOORS for file in (ROOT / floor).rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                fields = [
                    f
                    for f in node.body
                    if isinstance(f, ast.AnnAssign) and "ClassVar" not in ast.unparse(f.annotation)
                ]
                names = [ast.unparse(field.target) for field in fields]
                classes[node.name] = ([ast.unparse(each) for each in node.bases], names)
    of_settings, before = {"Config"}, 0
    while len(of_settings) > before:
        before = len(of_settings)
        of_settings |= {
            name for name, (parents, _) in classes.items() if of_settings.intersection(parents)
        }
    return {f"{name}.{field}" for name in of_settings - {"Config"} for field in classes[name][1]}


def test_every_field_of_a_class_of_settings_is_on_the_page_or_filled_in_by_a_run():
    on_page = {f"{setting.owner}.{setting.name}" for setting in settings() if setting.owner != "Driver"}
    assert declared() == on_page | FILLED.keys()


def test_every_setting_documents_when_to_change_it_and_every_number_its_unit():
    silent = [f"{s.owner}.{s.name}" for s in settings() if s.default and not WHEN.search(s.text)]
    assert not silent, (
        f"no sentence of these begins with Raise, Lower, Set, Choose, Give or Change: {silent}"
    )
    numbers = [s for s in settings() if re.match(r"number|integer|[≥>≤<]", s.allowed)]
    assert not [f"{s.owner}.{s.name}" for s in numbers if not s.unit] and len(numbers) > 60


def test_settings_stay_as_few_as_they_are():
    number = counts()
    values = number.pop("Losses") + number.pop("Graders") + number.pop("Simulated runs")
    assert number.pop("Driver") <= 19 and number.pop("Curriculum") <= 15 and values <= 111
    assert sum(number.values()) <= 132, "settings of a run"


def test_ranges_and_defaults_come_from_the_class():
    keep = next(s for s in settings_of(LinearCost) if s.name == "keep")
    assert (keep.unit, keep.default, keep.allowed) == ("share", "1.0", "≥ 0, ≤ 1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"vllm": {}},
            "RolloutConfig has no setting 'vllm' (value {}); tensor_parallel=..., max_num_seqs=..., ",
        ),
        (
            {"max_batched_tokens": 1},
            "no setting 'max_batched_tokens' (value 1); a step takes in 16,384 tokens",
        ),
        ({"max_num_seq": 1}, "no setting 'max_num_seq' (value 1); did you mean 'max_num_seqs'?"),
    ],
)
def test_a_removed_name_gives_its_replacement(given: dict[str, object], said: str):
    with pytest.raises(UserError) as caught:
        RolloutConfig(model="m", **given)  # pyright: ignore[reportArgumentType]
    assert said in str(caught.value)


def test_the_page_is_that_of_the_classes():
    assert (ROOT / "docs" / "settings.md").read_text() == page(), (
        "python docs/generate/settings_page.py > docs/settings.md"
    )
