"""The sender of vLLM's backends returns its memory to the GPU before engines go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.resharding import vllm_publisher
from weft.resharding.vllm_control import Receivers
from weft.resharding.vllm_publisher import VllmPublisher, _VllmBackend
from weft.resharding.weights import whole


def test_memory_is_released_after_the_last_tensor_and_before_engines_get_the_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Sender:
        """vLLM's sender, without an engine."""

        def send_weights(self) -> None:
            for name, _ in publisher._source:
                order.append(name)

        def shutdown(self) -> None:
            """Do nothing."""

    backends: Any = {"own": _VllmBackend(lambda *terms: terms, together=False, on_gpus=False)}  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(vllm_publisher, "BACKENDS", backends)
    monkeypatch.setattr(vllm_publisher, "release_device_memory", lambda _: order.append("released"))
    monkeypatch.setattr(Receivers, "send_sums", lambda *_: order.append("sums"))
    publisher = VllmPublisher("own")
    publisher._trainer = Sender()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(publisher, "_meet", lambda version: True)
    try:
        publisher.publish(whole({"a": torch.ones(3), "b": torch.ones(2, 2)}), 1, ["rollout[0]"])
        publisher.send(1)
        assert order == ["a", "b", "released", "sums"]
        assert publisher.finish() is not None
    finally:
        publisher.close()
