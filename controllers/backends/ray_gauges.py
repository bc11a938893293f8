"""RayGauges: the metrics of a run at the Prometheus endpoint of its Ray cluster, each as `ray_weft_NAME`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...dataflow.metric_names import entry_of, undeclared


class RayGauges:
    """A gauge for each metric, labelled with the run and the evaluation (empty: training). A gauge keeps the latest value."""

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def report(self, run: str, metrics: Mapping[str, float]) -> None:
        """Set the gauges.

        Args:
            run: its name.
            metrics: of a step, as a run writes them.
        """
        for name, value in metrics.items():
            gauge, evaluation = labelled(name)
            if gauge not in self._gauges:
                self._gauges[gauge] = _new_gauge(gauge, name)
            self._gauges[gauge].set(value, tags={"run": run, "evaluation": evaluation})


def _new_gauge(gauge: str, metric: str) -> Any:
    from ray.util.metrics import Gauge

    described = metric if undeclared([metric]) else f"{(entry := entry_of(metric)).meaning} ({entry.unit})"
    return Gauge(gauge, description=described, tag_keys=("run", "evaluation"))


def labelled(name: str) -> tuple[str, str]:
    """The gauge of a metric, and its evaluation.

    >>> labelled("actor/entropy"), labelled("heldout/failed_rows"), labelled("eval/reward/mean"), labelled("reward/my own")
    (('weft_actor_entropy', ''), ('weft_failed_rows', 'heldout'), ('weft_reward_mean', 'eval'), ('weft_reward_my_own', ''))
    """
    parts, evaluation = name.split("/"), ""
    if not undeclared([name]):
        entry = entry_of(name)
        own = 1 + entry.name.count("/") + (entry.place == "group")
        evaluation, parts = "/".join(parts[:-own]), parts[-own:]
    plain = re.sub(r"[^A-Za-z0-9]+", "_", "_".join(parts).replace("@", "_at_"))
    return f"weft_{plain}", evaluation
