"""The tests in this folder import `played_ledgers`, `ledgers` and `ledger_model`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
