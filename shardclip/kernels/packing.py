"""Small tensors are put together before they are read: on CPU a call costs more than its sum."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from shardclip.compat import numbers_in

SMALL = 1 << 15  # numbers; from here on a tensor goes alone


def packs(
    tensors: Sequence[Tensor], indices: Iterable[int], most: int
) -> list[tuple[list[int], int]]:
    """Group small tensors that can be concatenated; a large one is a group by itself.

    Args:
        tensors: Of any shape, dtype and device.
        indices: Which of them.
        most: A group that has so many numbers takes no more tensors.

    Returns:
        For each group the indices, and how many real numbers its tensors have together.
    """
    made: list[tuple[list[int], int]] = []
    open_groups: dict[object, int] = {}
    for index in indices:
        tensor = tensors[index]
        numel = numbers_in(tensor)
        kind = tensor.dtype, tensor.device, tensor.dim(), tensor.shape[1:]
        place = open_groups.get(kind)
        if numel >= SMALL:
            made.append(([index], numel))
        elif place is None or made[place][1] >= most:
            open_groups[kind] = len(made)
            made.append(([index], numel))
        else:
            held, before = made[place]
            held.append(index)
            made[place] = held, before + numel
    return made
