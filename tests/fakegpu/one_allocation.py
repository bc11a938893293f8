"""Allocate a tensor, and print its device and size as torch and the fake GPU count them."""

import ctypes
import json
import os

import torch

shim = ctypes.CDLL(os.environ["SHIM"])
shim.shim_used.restype = ctypes.c_long
made = torch.empty(1 << 20, device="cuda")
print(
    json.dumps(
        {
            "device": str(made.device),
            "allocated": torch.cuda.memory_allocated(),
            "on_device": shim.shim_used(),
        }
    )
)
