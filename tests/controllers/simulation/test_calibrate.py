"""Calibration recovers the costs of a run from its timeline."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from simulated_runs import costs, run, times

from weft.controllers.schedule import Synchronous
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import LogNormal, calibrate
from weft.dataflow.errors import UserError


def test_costs_are_found_again_in_the_timeline_of_a_run(tmp_path: Path):
    cost = costs(LogNormal(mean=60, max_tokens=300))
    driver = run(tmp_path, Synchronous(steps=6, prompts_per_step=3), Simulated(cost))
    generation = cost.nodes["rollout.generate"]
    found = calibrate(driver.directory.path, nodes={"rollout.generate": generation})
    for name in ("reward.score", "actor.update", "actor.publish_weights", "rollout.receive_weights"):
        expected, fitted = cost.linear(name), found.linear(name)
        assert fitted.fixed_s == pytest.approx(expected.fixed_s, abs=1e-6)
        assert fitted.per_token_s == pytest.approx(expected.per_token_s, abs=1e-9)
    again = run(tmp_path, Synchronous(steps=6, prompts_per_step=3), Simulated(found))
    assert times(again) == pytest.approx(times(driver))


def test_calibration_tells_rows_from_tokens_and_has_no_cost_below_zero():
    chance = np.random.default_rng(0)
    rows, tokens = chance.integers(1, 50, 40), chance.integers(100, 5000, 40)
    table = pa.table(
        {
            "group": ["critic"] * 40,
            "node": ["critic.values"] * 40,
            "worker_s": 0.3 + 0.02 * rows / 4 + 0.001 * tokens / 4,
            "rows": rows,
            "tokens": tokens,
        }
    )
    fitted = calibrate(table, replicas={"critic": 4}).linear("critic.values")
    assert (fitted.fixed_s, fitted.per_row_s, fitted.per_token_s) == pytest.approx((0.3, 0.02, 0.001))
    falling = table.set_column(2, "worker_s", pa.array(1.0 / tokens))
    assert calibrate(falling).linear("critic.values").fixed_s >= 0
    with pytest.raises(UserError, match="the timeline has no column 'tokens'"):
        calibrate(table.drop_columns("tokens"))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"placement": {}}', '{"backend": "RayBackend()", "placement": {"a": {}}}']
)
def test_a_run_whose_config_or_timeline_is_damaged_is_named(tmp_path: Path, text: str):
    with pytest.raises(UserError, match=r"config\.json lacks the ranks of each group .*No such file"):
        calibrate(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json lacks the ranks of each group"):
        calibrate(tmp_path)
    (tmp_path / "timeline.parquet").write_text("no table")
    with pytest.raises(UserError, match=r"the timeline of .*timeline\.parquet cannot be read"):
        calibrate(tmp_path / "timeline.parquet")
