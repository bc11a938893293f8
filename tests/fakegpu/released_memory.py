"""Allocate and drop a tensor, and release torch's memory. Prints the GPU's memory in use after each step."""

import ctypes
import json
import os

import torch

from weft.resharding.mapped_memory import release_device_memory

shim = ctypes.CDLL(os.environ["SHIM"])
shim.shim_used.restype = ctypes.c_long
kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
before = shim.shim_used()
dropped = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
del dropped
cached = shim.shim_used() - before
release_device_memory(kept.device)
print(json.dumps({"cached": cached, "released": shim.shim_used() - before}))
