"""What Megatron-core needs to run without a GPU, for the tests alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

_AS_CUDA = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


class CudaIsCpu(TorchFunctionMode):
    """Make device="cuda" the CPU, .cuda() nothing, and .type() say what Megatron checks for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _AS_CUDA.get(func(*args), func(*args))
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


@contextmanager
def megatron(**sizes) -> Iterator[None]:
    """Run the block with Megatron's process groups of these sizes, on CPU."""
    saved = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *args: None
    from megatron.core import parallel_state

    try:
        with CudaIsCpu():
            parallel_state.initialize_model_parallel(**sizes)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.cuda.current_device, torch.cuda.synchronize = saved
