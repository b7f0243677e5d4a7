"""Renders the batch scripts; pure text in, text out."""

import re
from collections.abc import Callable

from .errors import STOPPED, LaunchError
from .options import BatchOptions
from .quoting import for_sbatch, for_shell

_OPTION_NAME = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = ("nodes", "ntasks", "ntasks-per-node", "signal", "requeue", "no-requeue", "open-mode")

# The batch shell runs on the first host of the job, so a port bound here is free on the head.
_PROLOGUE = """\
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  # a task of an array is requeued by its own name: the job id alone may name another task
  job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}
fi
restart=${SLURM_RESTART_COUNT:-0}
export SHARDCLIP_RUN_DIR=$run_root/$job
export SHARDCLIP_STOP_FILE=$SHARDCLIP_RUN_DIR/stop
export SHARDCLIP_STOP_MARKER=$SHARDCLIP_RUN_DIR/stopped
mkdir -p -- "$SHARDCLIP_RUN_DIR" || exit
rm -f -- "$SHARDCLIP_STOP_FILE" "$SHARDCLIP_STOP_MARKER" \\
  "$SHARDCLIP_RUN_DIR/exit-code" "$SHARDCLIP_RUN_DIR/first-failure"

# This shell runs on the first host, the head: a port that can be bound here is free there.
MASTER_PORT=$("$python" -c 'import socket
with socket.socket() as s:
    s.bind(("", 0))
    print(s.getsockname()[1])') || exit
export MASTER_PORT
"""

_EPILOGUE = """\
step=$!

# A notice to this shell goes on to the ranks. The file stays for those that still import.
interrupted=no
# the traps call it
# shellcheck disable=SC2317,SC2329
notice() {
  interrupted=yes
  echo "$1" >> "$SHARDCLIP_STOP_FILE"
  kill -s "$1" "$step" 2>/dev/null
}
trap 'notice @NOTICE@' @NOTICE@
trap 'notice TERM' TERM
while :; do
  interrupted=no
  wait "$step"
  code=$?
  [ "$interrupted" = yes ] || break
done

# srun's code is that of the peers it killed; the first rank to fail left its own.
if [ -s "$SHARDCLIP_RUN_DIR/exit-code" ]; then
  code=$(cat -- "$SHARDCLIP_RUN_DIR/exit-code")
fi

# Only the ranks' own marker says that they saved; no exit code and no seen signal does.
if [ "$code" -eq 0 ] && [ -e "$SHARDCLIP_STOP_MARKER" ]; then
  stopped="stopped at step $(cat -- "$SHARDCLIP_STOP_MARKER")"
  # A cancelled job is to stay so, though its ranks were told as those of a preempted one are.
  if ! why=$("$python" -m shardclip.launch.ending "$job"); then
    echo "${why:-unknown why}: $stopped; not requeued by this script" >&2
    exit @STOPPED@
  fi
  if [ "$restart" -ge "$max_requeues" ]; then
    echo "$why: $stopped; requeued $restart times, the limit: submit again" >&2
    exit @STOPPED@
  fi
  echo "$why: $stopped; requeue $((restart + 1)) of $max_requeues" >&2
  scontrol requeue "$job" || exit @STOPPED@
  exit 0
fi
exit "$code"
"""


def render(options: BatchOptions, show: Callable[[str, str], str] | None = None) -> str:
    """Render the batch script of a job.

    Args:
        options: the job's.
        show: given a variable's name and value, returns what stands in the script for the value;
            for printing without secrets. None: the value.

    Raises:
        LaunchError: an option that cannot be rendered; the message names it.
    """
    _validate(options)
    lines = ["#!/usr/bin/env bash", *_directives(options), "#", *_comment(options)]
    typed = " ".join([*options.command, *options.env.values(), options.run_dir, options.python])
    if "$" in typed or "`" in typed:
        # standing before the first command it holds for the whole file
        lines += ["# quoted so that nothing expands", "# shellcheck disable=SC2016"]
    lines += ["set -uo pipefail", "", *_settings(options)]
    for name, value in options.env.items():
        lines.append(f"export {name}={for_shell(show(name, value) if show else value)}")
    lines += ["", *_command(options), "", _PROLOGUE]
    lines += _step(options)
    epilogue = _EPILOGUE.replace("@NOTICE@", options.notice_signal)
    return "\n".join(lines) + "\n" + epilogue.replace("@STOPPED@", str(STOPPED))


def _validate(options: BatchOptions) -> None:
    if options.launcher not in {"torchrun", "srun"}:
        raise LaunchError(f"--launcher {options.launcher!r}: torchrun or srun")
    if options.nodes < 1:
        raise LaunchError(f"--nodes {options.nodes}: a job needs at least one host")
    if options.procs_per_node is not None and options.procs_per_node < 1:
        raise LaunchError(f"--procs-per-node {options.procs_per_node}: at least one rank a host")
    if options.notice_signal not in {"USR1", "USR2"}:
        raise LaunchError(
            f"--notice-signal {options.notice_signal!r}: USR1 or USR2; Slurm uses the others itself"
        )
    for option in options.sbatch:
        if not _OPTION_NAME.fullmatch(option):
            raise LaunchError(f"--sbatch {option!r}: not an option's long name without dashes")
    tasks = options.sbatch.get("ntasks-per-node")
    if options.launcher == "torchrun" and tasks not in {None, "1"}:
        raise LaunchError(
            f"--ntasks-per-node={tasks}: under torchrun each host has one task, the launcher, "
            "which starts the ranks; more would fight for one port. Use --procs-per-node for the "
            "ranks, or --launcher srun for one task a rank"
        )
    taken = [o for o in options.sbatch if o in _RESERVED and o != "ntasks-per-node"]
    if taken:
        raise LaunchError(
            f"--sbatch {taken[0]}: the script sets it itself; use --nodes, --procs-per-node, "
            "--grace, --notice-signal or --max-requeues"
        )
    for name in options.env:
        if not _VARIABLE_NAME.fullmatch(name):
            raise LaunchError(f"--env {name!r}: not a variable's name")


def _directives(options: BatchOptions) -> list[str]:
    per_node: str | int = 1
    if options.launcher == "srun":
        per_node = options.procs_per_node or options.sbatch.get("ntasks-per-node") or 1
    values: dict[str, str | None] = {"nodes": str(options.nodes), "ntasks-per-node": str(per_node)}
    values |= {k: v for k, v in options.sbatch.items() if k != "ntasks-per-node"}
    values |= {
        "requeue": None,
        "open-mode": "append",
        # B: the shell below gets the notice even while the ranks still start
        "signal": f"B:{options.notice_signal}@{options.grace}",
    }
    return [
        f"#SBATCH --{key}" + ("" if value is None else f"={for_sbatch(key, value)}")
        for key, value in values.items()
    ]


def _comment(options: BatchOptions) -> list[str]:
    if options.launcher == "torchrun":
        what = "# One torchrun agent a host, which starts one rank a device."
    else:
        what = (
            "# One task a rank, started by srun itself: set --ntasks-per-node to a host's devices."
        )
    return [
        what,
        f"# By hand: sbatch [options] {options.launcher}.sbatch SCRIPT [ARGS...]",
        "# Options on sbatch's command line count before those above.",
    ]


def _settings(options: BatchOptions) -> list[str]:
    return [
        f"python={for_shell(options.python)}",
        f"max_requeues={int(options.max_requeues)}",
        # an absolute path, since ranks may change their directory
        f"run_root=$(realpath -m -- {for_shell(options.run_dir)}) || exit",
    ]


def _command(options: BatchOptions) -> list[str]:
    if options.command:
        return ["set -- " + " ".join(for_shell(word) for word in options.command)]
    return [
        'if [ "$#" -eq 0 ]; then',
        f'  echo "usage: sbatch [options] {options.launcher}.sbatch SCRIPT [ARGS...]" >&2',
        "  exit 2",
        "fi",
    ]


def _step(options: BatchOptions) -> list[str]:
    """Render the part that srun runs on every host; ranks are known only inside it."""
    if options.launcher == "srun":
        return [
            "# Since Slurm 22.05 srun does not inherit --cpus-per-task.",
            'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then',
            "  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
            "fi",
            "# The guard keeps notices from ending a rank that still imports, and writes its log.",
            "srun --kill-on-bad-exit=1 \\",
            f'  "$python" -m shardclip.launch.guard --grace={options.grace} \\',
            f"  --notice-signals=TERM,{options.notice_signal} --tee={for_shell(options.tee)} \\",
            '  -- "$@" &',
        ]
    count = f" --nproc-per-node={options.procs_per_node}" if options.procs_per_node else ""
    return [
        "# Since Slurm 22.05 srun does not inherit --cpus-per-task; an agent takes all.",
        "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}",
        "# One launcher fails after the other, each with the same code: srun need not end them.",
        'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\',
        "  --ntasks-per-node=1 --kill-on-bad-exit=0 \\",
        f'  "$python" -m shardclip.launch run --grace={options.grace}{count} \\',
        f"  --notice-signals=TERM,{options.notice_signal} --tee={for_shell(options.tee)} \\",
        '  -- "$@" &',
    ]
