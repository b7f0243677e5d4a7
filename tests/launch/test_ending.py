"""What is read from Slurm's words for a job, recorded in test_cluster.py's cluster."""

import pytest
from shardclip.launch.ending import judge, parse

SHOWN = """\
JobId=9 JobName=x PreemptTime=y JobState=RUNNING Restarts=9
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901756 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:04 TimeLimit=01:00:00 TimeMin=N/A
   SubmitTime=2026-12-01T03:16:06 EligibleTime=2026-12-01T03:16:06
   StartTime=2026-12-01T03:16:06 EndTime={end} Deadline=N/A
   PreemptEligibleTime=2026-12-01T03:16:06 PreemptTime={preempted}
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-12-01T03:16:06 Scheduler=Main
   Comment=JobState=RUNNING Reason=None
"""
NOW, LATER = "2026-12-01T03:16:10", "2026-12-01T03:17:10"


def shown(state="RUNNING", reason="None", restarts=0, end=LATER, preempted="None"):
    return SHOWN.format(state=state, reason=reason, restarts=restarts, end=end, preempted=preempted)


@pytest.mark.parametrize(
    ("text", "notices", "why"),
    [
        (shown(preempted=NOW), {"TERM"}, "preempted"),
        (shown(preempted=NOW), {"USR1"}, "preempted"),
        (shown("COMPLETING", "TimeLimit", preempted=NOW), {"TERM"}, "preempted"),
        (shown("COMPLETING", end=NOW, preempted=NOW), {"TERM"}, "preempted"),
        (shown("PREEMPTED", end=NOW, preempted=NOW), {"TERM"}, "preempted"),
        (shown(), {"USR1"}, f"told by USR1, time limit {LATER}"),
        (shown("COMPLETING", "TimeLimit"), {"TERM", "USR1"}, "time limit reached"),
        (shown("TIMEOUT", "TimeLimit"), {"TERM"}, "time limit reached"),
        (shown(), (), "asked for by the script or the stop file"),
        (shown(restarts=2, preempted=NOW), {"TERM"}, "preempted"),
    ],
)
def test_a_job_that_slurm_stopped_is_requeued(text, notices, why):
    restart = 2 if "Restarts=2" in text else 0
    ending = judge(parse(text), restart, notices)
    assert (ending.requeue, ending.why) == (True, why)


@pytest.mark.parametrize(
    ("text", "notices", "why"),
    [
        (shown("COMPLETING", end=NOW), {"TERM"}, "the job was cancelled (COMPLETING)"),
        (shown("CANCELLED", end=NOW), {"TERM"}, "the job was cancelled (CANCELLED)"),
        # cancelled while it was being preempted
        (shown("COMPLETING", preempted=NOW), {"TERM"}, "the job was cancelled (COMPLETING)"),
        (shown(), {"TERM"}, "the job's step was cancelled, or sent TERM by hand"),
        (shown(), {"TERM", "USR1"}, "the job's step was cancelled, or sent TERM by hand"),
        (shown(), {"INT"}, "the job's step was cancelled, or sent INT by hand"),
        # preempted without a grace time, or a node has failed
        (shown("COMPLETING", restarts=1), {"TERM"}, "Slurm itself starts the job again"),
        (shown("PENDING", "BeginTime", 1), {"TERM"}, "Slurm itself starts the job again"),
        ("", {"TERM"}, "Slurm does not tell whether the job was cancelled"),
        ("slurm_load_jobs error: Invalid job id specified\n", (),
         "Slurm does not tell whether the job was cancelled"),
    ],
)  # fmt: skip
def test_in_doubt_a_job_is_not_requeued(text, notices, why):
    ending = judge(parse(text), 0, notices)
    assert (ending.requeue, ending.why) == (False, why)
