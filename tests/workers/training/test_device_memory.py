"""Errors of a GPU that is out of memory. `tests/fakegpu` raises them in an engine."""

import pytest
import torch

from weft import Lora
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig
from weft.workers.reference import ReferenceConfig
from weft.workers.training.device_memory import memory_errors

OURS = "CUDA out of memory. Tried to allocate 556.00 MiB. GPU 0 has a total capacity of 79.19 GiB of which 31 MiB is free."


def said(config: ActorConfig, phase: str = "a forward and backward pass", tokens: int = 16384) -> str:
    with pytest.raises(UserError) as caught, memory_errors(phase, config, config, tokens=tokens):
        raise torch.OutOfMemoryError(OURS)
    return str(caught.value)


def test_an_error_names_the_phase_and_the_settings_that_save_memory():
    text = said(ActorConfig(model="m"))
    assert text == (
        "the device ran out of memory during a forward and backward pass and asked for 556.00 MiB more. "
        "Each of these saves memory: microbatch_tokens=8192 (now 16384); "
        'activation_checkpointing="elementwise"; activation_checkpointing=True; offload="moments"; '
        'offload="everything"; lora=weft.Lora(); more ranks. `weft plan` estimates what they save'
    )


def test_an_error_names_no_setting_that_is_set_or_does_not_help():
    lora = said(ActorConfig(model="m", lora=Lora(), activation_checkpointing="elementwise"))
    assert "elementwise" not in lora and "moments" not in lora and "Lora()" not in lora
    assert "activation_checkpointing=True" in lora and 'offload="everything"' in lora
    step = said(ActorConfig(model="m"), "the optimizer step", tokens=0)
    assert "microbatch_tokens" not in step and "activation_checkpointing" not in step
    smallest = ActorConfig(model="m", activation_checkpointing=True, offload="everything", lora=Lora())
    assert "memory: microbatch_tokens=2048 (now 4096); more ranks. " in said(smallest, tokens=4096)


def test_a_frozen_model_is_not_told_to_train_differently():
    config = ReferenceConfig(model="m")
    with pytest.raises(UserError) as caught, memory_errors("a forward pass", config, None, tokens=64):
        raise torch.OutOfMemoryError(OURS)
    assert 'microbatch_tokens=32 (now 64); offload="everything"; more ranks. ' in str(caught.value)


def test_other_errors_pass():
    config = ReferenceConfig(model="m")
    with pytest.raises(RuntimeError, match="another"), memory_errors("a forward pass", config, None):
        raise RuntimeError("another")
