"""Run tests with vLLM's model runner of GPUs (V2) on a CPU, in Triton's interpreter.

python tests/workers/generation/with_model_runner_v2.py PYTEST_ARGUMENT...
"""

import os
import sys
from types import SimpleNamespace

import pytest


def allow_model_runner_v2() -> None:
    """Select V2. vLLM asks for Triton's CPU back end, which no package on PyPI has; the interpreter
    needs none."""
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    allow_model_runner_v2()
    raise SystemExit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]]))
