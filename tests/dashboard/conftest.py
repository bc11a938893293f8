"""The tests beside this file make a run with the toy workers of the controllers' tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "controllers"))
