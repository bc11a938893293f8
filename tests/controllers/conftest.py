"""The tests below this folder import `toy`; so do the processes that they start (sys.path travels with a run), and the programs."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = [str(HERE), str(HERE / "recovery"), str(HERE / "simulation")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
