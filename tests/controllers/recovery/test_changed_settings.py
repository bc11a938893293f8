"""Settings of a resumed run are compared with those of older versions."""

from typing import Any

from weft.algorithms.corrections import Rejection, TruncatedImportance
from weft.algorithms.graders.math import Math
from weft.algorithms.graders.text import TagFormat
from weft.algorithms.preference_loss import DesirabilityLoss
from weft.algorithms.sampling import Sampling
from weft.algorithms.surrogates import Sapo
from weft.controllers.recovery.changed_settings import (
    _text,
    changes,
    recorded_settings,
    removed_settings,
    with_present_names,
)
from weft.controllers.schedule import Synchronous
from weft.dataflow.graph import group
from weft.workers.actor import ActorWorker
from weft.workers.adaptive_kl import AdaptiveKlWorker
from weft.workers.training.lora import Lora

OLD = {
    "actor.decay": "'linear'",
    "actor.decay_steps": "500",
    "actor.bucket_mib": "16",
    "actor.lora.alpha": "8",
    "actor.lora.rank": "4",
    "actor.lora.rslora": "True",
    "actor.deltas": "'auto'",
    "kl.coefficient.value": "0.2",
    "kl.coefficient.target": "6.0",
    "sampling.stop": "[]",
    "sampling.ignore_stop": "False",
    "correction.low": "0.5",
    "correction.high": "2.0",
    "surrogate.positive": "1.0",
    "surrogate.negative": "1.05",
    "loss.desirable_weight": "1.0",
    "loss.undesirable_weight": "1.0",
}
"""Settings as an older version recorded them, all with values that this version has as well."""


def recorded() -> dict[str, str]:
    """Return the settings of a run of this version."""
    handles: Any = {
        "actor": group(
            ActorWorker, model="m", decay=("linear", 500), lora=Lora(rank=4, alpha=8 * 4**0.5)
        ),
        "kl": group(AdaptiveKlWorker),
        **{
            name: type("Handle", (), {"config": config})
            for name, config in {
                "sampling": Sampling(),
                "correction": Rejection(),
                "surrogate": Sapo(),
                "loss": DesirabilityLoss(),
            }.items()
        },
    }
    return recorded_settings({}, handles, Synchronous())[0]


def reported(before: dict[str, str]) -> list[str]:
    now = recorded()
    before = with_present_names(before, now)
    return changes(before, now, {}, "reported") + removed_settings(before, now)


def test_equal_settings_of_an_older_version_are_no_changes():
    assert reported(OLD) == []
    assert reported(OLD | {"actor.decay": "'constant'", "actor.decay_steps": "None"}) == [
        "actor.decay was 'constant', is ['linear', 500]"
    ]


def test_other_values_of_an_older_version_are_reported_under_their_present_names():
    other = {
        "actor.decay_steps": "400",
        "actor.lora.rslora": "False",
        "kl.coefficient.target": "3.0",
        "sampling.ignore_stop": "True",
        "correction.low": "0.25",
        "surrogate.negative": "1.5",
        "loss.desirable_weight": "2.0",
    }
    assert sorted(reported(OLD | other)) == [
        "actor.decay was ['linear', 400], is ['linear', 500]",
        "actor.lora.alpha was 8, is 16",
        "correction.keep was [0.25, 2.0], is [0.5, 2.0]",
        "kl.target was 3.0, is 6.0",
        "loss.weights was [2.0, 1.0], is [1.0, 1.0]",
        "sampling.stop was None, is []",
        "surrogate.temperatures was [1.0, 1.5], is [1.0, 1.05]",
    ]


def test_texts_of_lists_of_an_older_version_are_compared_in_their_present_form():
    cases = {
        (TruncatedImportance(), Rejection()): "[TruncatedImportance(cap=2.0, floor=0.0, level='token'), "
        "Rejection(low=0.5, high=2.0, level='token')]",
        (TagFormat(), Math()): "[TagFormat(tags=('think',), rest=True, opened=False), "
        "Math(deadline_s=10.0)]",
    }
    for value, text in cases.items():
        assert with_present_names({"x": text}, {})["x"] == _text(value)
        assert with_present_names({"x": text.replace("0.0", "0.5", 1)}, {})["x"] != _text(value)


def test_a_removed_setting_that_affects_results_is_reported():
    before = {
        "reward.deadline_s": "None",
        "reward.function.deadline_s": "30.0",
        "reward.function.settings.penalty": "0.5",
        "schedule.short_steps": "'stop'",
    }
    assert removed_settings(before, {}) == [
        "reward.function.deadline_s was 30.0, and is no longer a setting",
        "reward.function.settings.penalty was 0.5, and is no longer a setting",
        "schedule.short_steps was 'stop', and is no longer a setting",
    ]
