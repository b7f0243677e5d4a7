"""Power sums on CPU: short float32 rows at memory bandwidth, combined in float64.

A row is so short that even its worst case (a large number first, then many small ones that round
away) stays below 1e-6; the rows are combined in float64. 16-bit gradients go through a float32
buffer that stays in cache, small tensors are packed, neighbours in one storage are read as one.
Where float32 cannot hold the squares (beyond 1e19, below 1e-10), the bucket is summed again in
float64: rare, and seen from the result alone.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardclip.compat import in_storage_order, on_host

from . import foreach
from .packing import packs

_ROW = 256  # elements summed in float32, in at least 16 partial sums
_BUFFER = 1 << 19  # elements of float32 scratch: 2 MiB, which a core's cache holds about
_PATIENCE = 3  # times that tensors side by side may move apart before nobody looks any more
# float32 squares lose at most 2^-126 an element: below this sum that could be seen.
_FAINT = 1e-20
_AS_THEY_ARE = (torch.float32, torch.float64)  # summed in their own precision


_scratch = threading.local()


@dataclass
class _Run:
    """Tensors that are summed in one go.

    Attributes:
        bucket: Where their sum goes.
        indices: Which tensors; several are small ones, or lie side by side in one storage.
        numel: Of all together.
        wide: The dtype that their rows are summed in.
        offsets: Where each begins, in bytes from the first, if they lie side by side.
        table: Rows and their length, where the storage can be read as it is and has no rest.
        norms: Of rows: the bucket's, a view.
    """

    bucket: int
    indices: list[int]
    numel: int
    wide: torch.dtype
    offsets: list[int] = field(default_factory=list)
    table: tuple[int, int] | None = None
    norms: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def rows(self) -> int:
        return -(-self.numel // _ROW)


class PowerSums:
    """Sum |x|^p per bucket; see ``kernels.build``."""

    _patience = _PATIENCE

    def __init__(self, tensors: Sequence[Tensor], buckets: Sequence[int], count: int) -> None:
        self.each: Tensor | None = None  # small tensors are summed together
        self._buckets: list[list[int]] = [[] for _ in range(count)]
        for index, (tensor, bucket) in enumerate(zip(tensors, buckets, strict=True)):
            if tensor.numel():
                self._buckets[bucket].append(index)
        self._moved = 0
        self._arrange(tensors)

    @torch.inference_mode(False)  # what is kept is written in later steps, in whatever mode
    def _arrange(self, tensors: Sequence[Tensor]) -> None:
        """Work out what is summed in one go, and where the rows' norms go."""
        self._runs: list[_Run] = []
        for bucket, held in enumerate(self._buckets):
            alone = held
            if self._moved < self._patience:
                runs, alone = _side_by_side(tensors, held, bucket)
                self._runs += runs
            self._runs += [
                _Run(bucket, together, numel, _wide(tensors[together[0]].dtype))
                for together, numel in packs(tensors, alone, _BUFFER)
            ]
        self._norms = self._lay_out_rows(tensors)

    def _lay_out_rows(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Put the rows' norms of each bucket side by side, one tensor for each precision."""
        laid_out: list[list[Tensor]] = [[] for _ in self._buckets]
        for bucket, wide in dict.fromkeys((run.bucket, run.wide) for run in self._runs):
            runs = [run for run in self._runs if (run.bucket, run.wide) == (bucket, wide)]
            norms = torch.empty(sum(run.rows for run in runs), dtype=wide, device="cpu")
            laid_out[bucket].append(norms)
            for run, view in zip(runs, torch.split(norms, [run.rows for run in runs]), strict=True):
                run.norms = view
        for run in self._runs:
            alone = len(run.indices) == 1 or bool(run.offsets)
            if alone and run.numel % _ROW == 0 and tensors[run.indices[0]].dtype in _AS_THEY_ARE:
                run.table = run.rows, _ROW
        return laid_out

    def __call__(self, tensors: Sequence[Tensor], p: float) -> Tensor:
        """Sum tensors like those that this was built for."""
        if p not in (1, 2):
            return self._elementwise(tensors, p)
        if any(_have_moved(run, tensors) for run in self._runs if run.offsets):
            self._moved += 1
            self._arrange(tensors)
        totals = self._squares(tensors) if p == 2 else self._magnitudes(tensors)
        for bucket, total in enumerate(totals):
            if not _FAINT < total < math.inf:
                totals[bucket] = _wide_sum([tensors[i] for i in self._buckets[bucket]], p)
        return on_host(totals)

    def _squares(self, tensors: Sequence[Tensor]) -> list[float]:
        for run in self._runs:
            first = tensors[run.indices[0]]
            if run.table is None or first.requires_grad or not first.is_contiguous():
                _row_norms(self._flat(run, tensors, 2), run.norms)
            else:  # most bytes come this way, with as few calls as it can be done with
                table = first.as_strided(run.table, (_ROW, 1))
                torch.linalg.vector_norm(table, dim=1, out=run.norms)
        totals = []
        for held in self._norms:
            wide = (room(torch.float64, norms.numel()).copy_(norms) for norms in held)
            totals.append(math.fsum(float(norms.dot(norms)) for norms in wide))
        return totals

    def _flat(self, run: _Run, tensors: Sequence[Tensor], p: float) -> Tensor:
        """View a run's tensors as one dimension; small ones are copied together first."""
        first = tensors[run.indices[0]]
        if run.offsets:
            return first.detach().as_strided((run.numel,), (1,))
        if len(run.indices) == 1:
            return _flatten(first, p)
        held = [tensors[index] for index in run.indices]
        if first.is_complex() or not first.dim():
            return _flatten(torch.cat([tensor.reshape(-1) for tensor in held]), p)
        joined = room(first.dtype, run.numel).view(-1, *first.shape[1:])
        return torch.cat(held, out=joined).view(-1)

    def _magnitudes(self, tensors: Sequence[Tensor]) -> list[float]:
        parts: list[list[float]] = [[] for _ in self._buckets]
        for run in self._runs:
            for block in _blocks(self._flat(run, tensors, 1)):
                parts[run.bucket].append(float(block.abs().sum(dtype=torch.float64)))
        return [math.fsum(part) for part in parts]

    def _elementwise(self, tensors: Sequence[Tensor], p: float) -> Tensor:
        if p == 0 or math.isinf(p):
            order = [(i, bucket) for bucket, held in enumerate(self._buckets) for i in held]
            held = [tensors[index] for index, _ in order]
            buckets = [bucket for _, bucket in order]
            return foreach.PowerSums(held, buckets, len(self._buckets))(held, p)
        out = torch.zeros(len(self._buckets), dtype=torch.float64, device="cpu")
        for bucket, held_here in enumerate(self._buckets):
            for index in held_here:
                for block in torch.split(_flatten(tensors[index], p), _BUFFER):
                    out[bucket] += block.double().abs().pow_(p).sum()
        return out


class AlikeSums(PowerSums):
    """The same for ranks that are to get the same bits, wherever their tensors lie."""

    _patience = 0


def _side_by_side(
    tensors: Sequence[Tensor], indices: Sequence[int], bucket: int
) -> tuple[list[_Run], list[int]]:
    """Find tensors without a gap between them in one storage, as FSDP2 and DDP lay gradients out.

    Returns:
        A run for each such stretch, and the tensors that lie alone.
    """
    storages: dict[object, list[int]] = defaultdict(list)
    for index in indices:
        tensor = tensors[index]
        if tensor.is_contiguous() and not tensor.is_complex():
            storages[tensor.untyped_storage()._cdata, tensor.dtype].append(index)
    runs = []
    for held in storages.values():
        if len(held) < 2:
            continue  # nor is its address asked for, which ends a watch over its memory
        held.sort(key=lambda index: tensors[index].data_ptr())
        stretch: list[int] = []
        end = -1
        for index in held:
            begin = tensors[index].data_ptr()
            if begin != end and stretch:
                runs.append(stretch)
                stretch = []
            stretch.append(index)
            end = begin + tensors[index].nbytes
        runs.append(stretch)
    runs = [stretch for stretch in runs if len(stretch) > 1]
    taken = {index for stretch in runs for index in stretch}
    made = [_adjacent(tensors, stretch, bucket) for stretch in runs]
    return made, [index for index in indices if index not in taken]


def _adjacent(tensors: Sequence[Tensor], stretch: list[int], bucket: int) -> _Run:
    base = tensors[stretch[0]].data_ptr()
    offsets = [tensors[index].data_ptr() - base for index in stretch]
    numel = sum(tensors[index].numel() for index in stretch)
    return _Run(bucket, stretch, numel, _wide(tensors[stretch[0]].dtype), offsets)


def _have_moved(run: _Run, tensors: Sequence[Tensor]) -> bool:
    """Whether tensors that lay side by side no longer do: gradients are new in every step."""
    held = [tensors[index] for index in run.indices]
    places = list(map(Tensor.data_ptr, held))
    base = places[0]
    if [place - base for place in places] != run.offsets:
        return True
    if not all(map(Tensor.is_contiguous, held)):
        return True
    left = held[0].untyped_storage().nbytes() - held[0].storage_offset() * held[0].itemsize
    return left < run.numel * held[0].itemsize


def room(dtype: torch.dtype, numel: int) -> Tensor:
    """Return scratch memory, kept between steps: fresh memory costs more than what it is for.

    All kernels of a thread share it, one at a time.
    """
    held = vars(_scratch).setdefault("held", {})
    if dtype not in held or held[dtype].numel() < numel:
        with torch.inference_mode(False):
            held[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
    found: Tensor = held[dtype][:numel]
    return found


def _flatten(tensor: Tensor, p: float) -> Tensor:
    """View as one dimension of real numbers, in storage order: a sum does not care."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = foreach.real_numbers(tensor, p)
    if not tensor.is_contiguous():
        tensor = in_storage_order(tensor)
    return tensor.reshape(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that rows are summed in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _blocks(flat: Tensor) -> Iterator[Tensor]:
    """Cut into blocks of single or double precision; those of 16 bits share one buffer."""
    if flat.dtype in _AS_THEY_ARE:
        yield from torch.split(flat, _BUFFER)
        return
    buffer = room(torch.float32, min(_BUFFER, flat.numel()))
    for block in torch.split(flat, _BUFFER):
        yield buffer[: block.numel()].copy_(block)


def _row_norms(flat: Tensor, out: Tensor) -> None:
    """Write the norm of each row into ``out``; the last row may be shorter."""
    if flat.dtype not in _AS_THEY_ARE:
        rows = _BUFFER // _ROW
        for index, wide in enumerate(_blocks(flat)):
            _row_norms(wide, out[index * rows : (index + 1) * rows])
        return
    full, rest = divmod(flat.numel(), _ROW)
    if rest:
        torch.linalg.vector_norm(flat[full * _ROW :], out=out[full])
        flat, out = flat[: full * _ROW], out[:full]
    if full:
        torch.linalg.vector_norm(flat.view(-1, _ROW), dim=1, out=out)


def _wide_sum(tensors: list[Tensor], p: float) -> float:
    """Sum in float64: for what float32 cannot hold, and to see that zeros are zeros."""
    present = [t for t in tensors if bool(t.any())]
    kernel = foreach.PowerSums(present, [0] * len(present), 1)
    return float(kernel(present, p)[0])
