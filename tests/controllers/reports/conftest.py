"""The tests here import `fake_trackers`, and so do the processes that they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
