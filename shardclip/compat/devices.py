"""Small tensors on their way between host and device, without a host sync."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def on_host(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Make a small tensor on the host, whatever torch's default device and dtype are."""
    return torch.tensor(values, dtype=dtype, device="cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor without a host sync, unless it goes to the host: then it must wait."""
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        return tensor.to(device)
    pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


@lru_cache(maxsize=256)
def constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a small tensor that is the same in most steps; never write into it.

    Kept on its device: a step then copies nothing there, and can be captured in a CUDA graph.
    """
    return to_device(on_host(values, dtype), device)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing can be read in this call."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class HostCopy:
    """A small tensor on its way to the host; on an accelerator nobody waits for it yet."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if is_capturing():  # nobody will read it
            return
        self._host = tensor.to("cpu", non_blocking=True)
        if tensor.device.type != "cpu":
            self._event = torch.Event(tensor.device)
            # Not the current device's stream, which is another one's without set_device().
            self._event.record(torch.accelerator.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Ask without waiting; for what is this rank's alone, such as a log."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Wait until it has arrived; never poll, so that all ranks do the same."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def device_errors() -> tuple[type[Exception], ...]:
    """Return what torch raises where a device has failed or is full."""
    names = ("AcceleratorError", "OutOfMemoryError")
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))
