"""Everything of torch that is private, or new in a version, behind one guarded place.

In come tensors, process groups and meshes of torch's, out come plain answers about them: nothing
here knows of norms, plans or ranks.
"""

from .devices import (
    HostCopy,
    constant,
    device_errors,
    is_capturing,
    on_host,
    to_device,
)
from .groups import (
    bare_mesh,
    bytes_device,
    default_store,
    group_accelerator,
    is_registered,
    root_mesh,
    sequence_number,
)
from .memory import (
    first_sharing_memory,
    is_marked,
    mark,
    shares_memory,
    signature,
    signatures,
    storage_address,
    unmark,
)
from .tensors import (
    from_local,
    full_tensor,
    global_offset,
    in_storage_order,
    is_dtensor,
    is_fsdp1_flattened,
    is_plain,
    is_strided,
    local_numel,
    local_tensor,
    local_tensors,
    mesh_and_placements,
    numbers_in,
    real_view,
    unsharded_by_fsdp,
)

__all__ = [
    "HostCopy",
    "bare_mesh",
    "bytes_device",
    "constant",
    "default_store",
    "device_errors",
    "first_sharing_memory",
    "from_local",
    "full_tensor",
    "global_offset",
    "group_accelerator",
    "in_storage_order",
    "is_capturing",
    "is_dtensor",
    "is_fsdp1_flattened",
    "is_marked",
    "is_plain",
    "is_registered",
    "is_strided",
    "local_numel",
    "local_tensor",
    "local_tensors",
    "mark",
    "mesh_and_placements",
    "numbers_in",
    "on_host",
    "real_view",
    "root_mesh",
    "sequence_number",
    "shares_memory",
    "signature",
    "signatures",
    "storage_address",
    "to_device",
    "unmark",
    "unsharded_by_fsdp",
]
