"""Large tensors reuse the pages of freed ones."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from weft.workers.training.fsdp import keep_freed_memory

def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.full(size, 1, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

size = 256 << 20
fresh = faults(size)
keep_freed_memory()
faults(size)
print(fresh, faults(size))
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_freed_memory_is_used_again_without_a_fault():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    fresh, again = map(int, done.stdout.split())
    assert again < fresh / 10
