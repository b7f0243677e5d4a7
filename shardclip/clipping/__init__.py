"""What users call: the functions, `GradClipper`, and clipping by value, tensor or unit.

In come a caller's parameters and settings; each name here is re-exported by `shardclip`.
"""

from .agc import AdaptiveGradClipper, adaptive_clip_grad_
from .clipper import GradClipper
from .functions import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from .per_tensor import PerTensorClipper, clip_grad_per_tensor_norm_
from .tensorflow import clip_by_global_norm, global_norm
from .value import clip_grad_value_

__all__ = [
    "AdaptiveGradClipper",
    "GradClipper",
    "PerTensorClipper",
    "adaptive_clip_grad_",
    "clip_by_global_norm",
    "clip_grad_norm_",
    "clip_grad_per_tensor_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "global_norm",
]
