"""What the launcher's tests run on the ranks: `ranks.py DOES WHICH_RANK`, with a sum before it."""

import os
import signal
import subprocess
import sys
import time


def main():
    does, which = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    if does == "import-slowly":
        print(f"rank {rank} importing", flush=True)
        time.sleep(4)
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
    init_distributed(timeout=float(os.environ.get("RANKS_TIMEOUT", "60")))
    value = torch.ones(1)
    dist.all_reduce(value)
    print(f"rank {rank} sum {value.item():g}", flush=True)
    end(does, rank == which)
    for step in range(int(os.environ.get("RANKS_STEPS", "400"))):
        if stop.agree():
            print(f"rank {rank} stops at step {step}", flush=True)
            stop.mark(step)
            break
        time.sleep(0.2)
    dist.destroy_process_group()


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
    main()
