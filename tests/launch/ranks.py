"""What the launcher's tests run on the ranks: `ranks.py DOES WHICH_RANK`, with a sum before it."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

JOIN_S = 180.0  # ranks of a loaded machine import torch at very different speeds


def main():
    does, which = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    if does == "import-slowly":
        print(f"rank {rank} importing", flush=True)
        import_until_noticed()
    if does == "orphan" and rank == which:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if does == "plain":
        # no process group, so no torch
        print(f"rank {rank} on {os.uname().nodename}", flush=True)
        time.sleep(600 if which else 0)
        return
    if does in {"exit", "raise", "kill"} and os.environ.get("WITHOUT_TORCH"):
        end(does, rank == which)
        time.sleep(30)
        return
    import torch
    import torch.distributed as dist
    from shardclip.launch import StopSignal, init_distributed

    stop = StopSignal()
    init_distributed(timeout=JOIN_S)
    group = None
    if "RANKS_TIMEOUT" in os.environ:
        # not of the start: it is for what happens to ranks that have met
        group = dist.new_group(timeout=timedelta(seconds=float(os.environ["RANKS_TIMEOUT"])))
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    print(f"rank {rank} sum {value.item():g}", flush=True)
    dist.barrier(group)  # all have printed before one of them fails
    end(does, rank == which)
    for step in range(int(os.environ.get("RANKS_STEPS", "400"))):
        if agree(stop, group):
            print(f"rank {rank} stops at step {step}", flush=True)
            stop.mark(step)
            break
        time.sleep(0.2)
    dist.barrier(group)  # no rank takes its connections down while another still uses them
    dist.destroy_process_group()


def import_until_noticed():
    """Be busy until the notice is out, so that it comes meanwhile on any machine."""
    end_of_patience = time.monotonic() + 60
    notice = Path(os.environ["SHARDCLIP_STOP_FILE"])
    while not notice.exists() and time.monotonic() < end_of_patience:
        time.sleep(0.05)


def agree(stop, group):
    try:
        return stop.agree(group)
    except RuntimeError:
        # a peer has failed; a training takes a moment to end, this program does not
        time.sleep(1)
        raise


def end(does, here):
    if not here:
        return
    if does == "exit":
        # at once: torch's threads, should they abort while Python ends, would change the code
        os._exit(7)
    if does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "raise":
        raise ValueError("the root cause")


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # Python's own traceback and code, but at once, as in end()
        sys.excepthook(*sys.exc_info())
        os._exit(1)
