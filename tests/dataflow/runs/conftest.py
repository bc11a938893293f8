"""Imports of the tests here: `fragile_disk` of the buffer's tests, and runs of the controllers' toy workers."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "dataflow" / "buffer"), str(TESTS / "controllers")]
