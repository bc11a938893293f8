"""What holds for all tests: `forked` and its neighbours are found, and each process computes with one thread."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more, and on a busy machine lose much
