"""The tests beside this file import `toy`; so do the worker processes that they start (sys.path travels with a run)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
