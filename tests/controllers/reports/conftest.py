"""Let the tests here, and the processes they start, import `fake_trackers`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
