"""Imported once, before ranks are forked: the frameworks take most of a minute to import."""

import os
import warnings
from unittest import mock

os.environ["DS_ACCELERATOR"] = "cpu"

# Without an accelerator torchtitan would fall back to CUDA, which it decides when it is imported.
_on_cpu = mock.patch("torch._utils._get_available_device_type", return_value="cpu")

with warnings.catch_warnings(), _on_cpu:
    warnings.simplefilter("ignore")
    import accelerate
    import deepspeed
    import lightning.fabric
    import lightning.pytorch
    import megatron.core.distributed
    import megatron.core.optimizer
    import megatron.core.tensor_parallel
    import torchtitan.models.llama3
    import transformers.models.llama
    import transformers.trainer

__all__ = ["accelerate", "deepspeed", "lightning", "megatron", "torchtitan", "transformers"]
