"""Lets tests run their own event loop in a process that also runs browser tests."""

import asyncio
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_other_loop() -> Iterator[None]:
    """Playwright's synchronous interface leaves its loop marked as running in the main thread."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    yield
    asyncio._set_running_loop(loop)
