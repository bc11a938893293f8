"""Run the doctor's checks that need no kernels, and make a rank's device. Print what each found."""

import json
import tempfile
from pathlib import Path

from weft.controllers.doctor import hardware
from weft.controllers.doctor.trials import Case
from weft.dataflow.errors import UserError
from weft.workers.worker import Context, rank_device

hardware._COPIED[True] = 32 << 20
found: dict[str, object] = {}
with tempfile.TemporaryDirectory() as folder:
    case = Case(Path(folder), gpu=True)
    for check in (hardware.driver, hardware.copies):
        try:
            found[check.__name__] = dict(check(case))
        except AssertionError as error:
            found[check.__name__] = str(error)
            break  # as `run_trials` does after a check that the others need
try:
    found["rank"] = str(rank_device(Context("actor", devices=("0",))))
except UserError as error:
    found["rank"] = str(error)
print(json.dumps(found))
