"""The tests below this folder import `toy` and its neighbours; so do the processes that they start (sys.path travels with a run), and
the programs."""

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
