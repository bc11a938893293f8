"""Run tests of vLLM's engine with drafts.

python tests/workers/generation/with_speculation.py METHOD PYTEST_ARGUMENT...
"""

import os
import sys
from typing import Any

import pytest

from weft.workers.generation.speculation import Speculation
from weft.workers.generation.vllm_engine import VllmEngine
from weft.workers.generation.vllm_settings import VllmSettings

ALWAYS = 10**6
"""A batch size that no test reaches."""


class WithSpeculation:
    """Plugin of pytest that lets engines draft, and leaves out what they refuse: samples with
    min_p or min_tokens."""

    def __init__(self, method: Any) -> None:
        self._method = method

    @pytest.fixture(scope="session", autouse=True)
    def draft(self) -> Any:
        start = VllmEngine.__init__

        def start_with_drafts(
            engine: VllmEngine, model: str, settings: VllmSettings = VllmSettings(), **more: Any
        ) -> None:
            drafts = Speculation(method=self._method, off_above=ALWAYS)
            more["kept_sets"] = False
            start(engine, model, settings.model_copy(update={"speculation": drafts}), **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VllmEngine, "__init__", start_with_drafts)
            yield

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not _is_refused(item)]


def _is_refused(item: pytest.Item) -> bool:
    sampling = item.callspec.params.get("sampling") if hasattr(item, "callspec") else None  # pyright: ignore
    return sampling is not None and bool(sampling.min_p or sampling.min_tokens)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    method, *arguments = sys.argv[1:]
    given = ["-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    raise SystemExit(pytest.main(given, plugins=[WithSpeculation(method)]))
