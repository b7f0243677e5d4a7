"""What the launcher refuses, and the exit codes it promises."""

OK = 0
REFUSED = 2
"""A wrong option, a refused configuration: nothing was started."""
HOST_LOST = 74
"""A host did not join, or stopped answering."""
STOPPED = 75
"""A batch job was stopped and saved, but may not be requeued once more: submit it again."""

EXIT_CODES = """\
exit codes:
  0        every rank exited 0 (also after a notice, when all saved and stopped)
  1 - 125  that of the first rank to fail, on whichever host
  128 + n  the first rank to fail was ended by signal n, or the run was ended by
           signal n because the ranks did not stop within the grace time
  2        refused: a wrong option or configuration; nothing was started
  74       a host did not join, or stopped answering
  75       (batch script) stopped and saved, and not requeued: the limit is reached, or cancelled
"""


class LaunchError(Exception):
    """A configuration that is refused: says what, where and what to do."""


class HostLostError(Exception):
    """A host did not join the run, or stopped answering; the message names it."""
