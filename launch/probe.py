"""What `shardclip-launch check` runs on every rank; rank 0 leaves all ranks' facts in a file."""

import importlib.metadata
import json
import os
import platform
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import variables as names
from .devices import cpus
from .environment import Placement
from .network import resolve
from .process_group import init_distributed

_LARGE = 1 << 20
_ROUNDS = 10
_PINGS = 5


def _versions() -> dict[str, str]:
    nccl = "-"
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    try:
        shardclip = importlib.metadata.version("shardclip")
    except importlib.metadata.PackageNotFoundError:
        shardclip = "not installed"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": nccl,
        "driver": _driver(),
        "shardclip": shardclip,
    }


def _driver() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return "-"
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ..."
    return next((w for w in words if w[:1].isdigit() and w.count(".") >= 1), "unknown")


def _head() -> dict[str, Any]:
    """Connect to the head's store as any rank would, and time it."""
    host, port = os.environ[names.MASTER_ADDR], int(os.environ[names.MASTER_PORT])
    begin = time.perf_counter()
    with socket.create_connection((host, port), timeout=10):
        seconds = time.perf_counter() - begin
    addresses = sorted({address for _, address in resolve(host, port)})
    return {"address": host, "port": port, "resolves_to": addresses, "seconds": seconds}


def _facts(place: Placement) -> dict[str, Any]:
    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "host": socket.gethostname(),
        "rank": place.rank,
        "local_rank": place.local_rank,
        "node_rank": place.node_rank,
        "device": device,
        "devices_on_host": torch.cuda.device_count(),
        "cpus": cpus(),
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        "head": _head(),
    }


def _clock_offset(rank: int, world_size: int) -> tuple[float, float] | None:
    """Return how far this rank's clock is ahead of rank 0's, and the uncertainty, in seconds."""
    mine: tuple[float, float] | None = (0.0, 0.0) if rank == 0 else None
    stamp = torch.zeros(1, dtype=torch.float64)
    for peer in range(1, world_size):
        if rank == 0:
            for _ in range(_PINGS):
                dist.recv(stamp, peer)
                stamp[0] = time.time()
                dist.send(stamp, peer)
        elif rank == peer:
            best = (0.0, float("inf"))
            for _ in range(_PINGS):
                begin = time.time()
                dist.send(stamp, 0)
                dist.recv(stamp, 0)
                end = time.time()
                offset = (begin + end) / 2 - stamp.item()
                best = min(best, (offset, (end - begin) / 2), key=lambda pair: pair[1])
            mine = best
    return mine


def _all_reduce(rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """All-reduce rank + 1, whose sum is n (n + 1) / 2, small and large."""
    expected = world_size * (world_size + 1) / 2
    right = True
    seconds = {}
    for numel in (1, _LARGE):
        times = []
        for _ in range(_ROUNDS):
            values = torch.full((numel,), float(rank + 1), device=device)
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(values)
            # reading one value waits for the device
            right &= values[-1].item() == expected
            times.append(time.perf_counter() - begin)
            right &= bool((values == expected).all())
        seconds[numel] = statistics.median(times)
    moved = 2 * (world_size - 1) / world_size * 4 * _LARGE
    return {
        "right": right,
        "latency_seconds": seconds[1],
        "bytes": 4 * _LARGE,
        "bandwidth_bytes_per_second": moved / seconds[_LARGE],
    }


def _gradient_norm(world_size: int, device: torch.device) -> dict[str, Any]:
    """Compare the norm of a sharded gradient with that of the whole, known on every rank."""
    whole = torch.arange(1, 257, dtype=torch.float32, device=device).sin().reshape(64, 4)
    reference = float(torch.linalg.vector_norm(whole.double()))
    try:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
        from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415

        import shardclip  # noqa: PLC0415 - its absence is reported, not raised

        mesh = init_device_mesh(device.type, (world_size,))
        gradient = distribute_tensor(whole, mesh, [Shard(0)])
        norm = float(shardclip.get_total_norm([gradient]))
    except Exception as error:
        return {"reference": reference, "error": f"{type(error).__name__}: {error}"[:300]}
    return {"reference": reference, "norm": norm}


def _gathered(facts: dict[str, Any], world_size: int) -> list[Any]:
    """Give every rank every rank's facts, as JSON: torch's own exchange of objects needs numpy."""
    text = json.dumps(facts).encode()
    length = torch.tensor([len(text)])
    dist.all_reduce(length, dist.ReduceOp.MAX)
    told = [bytearray(int(length)) for _ in range(world_size)]
    padded = bytearray(text.ljust(int(length)))
    dist.all_gather(
        [torch.frombuffer(one, dtype=torch.uint8) for one in told],
        torch.frombuffer(padded, dtype=torch.uint8),
    )
    return [json.loads(one) for one in told]


def main() -> None:
    """Gather every rank's facts and write them to the file named on the command line."""
    place = init_distributed(timeout=30.0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    facts = _facts(place)
    facts["clock"] = _clock_offset(place.rank, place.world_size)
    facts["all_reduce"] = _all_reduce(place.rank, place.world_size, device)
    facts["gradient_norm"] = _gradient_norm(place.world_size, device)
    gathered = _gathered(facts, place.world_size)
    if place.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()
    # all is written; threads of torch that die while Python finalizes would look like a fault
    os._exit(0)


if __name__ == "__main__":
    main()
