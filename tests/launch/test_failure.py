from shardclip.launch.failure import Failure, exit_code, last_traceback, reason

CHAINED = """\
noise
Traceback (most recent call last):
  File "old.py", line 1, in <module>
OldError: before
retrying
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'k'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
ValueError: bad
""".splitlines()


def test_the_last_traceback_and_its_chain_are_kept():
    found = last_traceback(CHAINED).splitlines()
    assert found == [line.rstrip() for line in CHAINED[5:]]


def test_torchs_rank_prefix_is_dropped():
    assert last_traceback([f"[rank3]: {line}" for line in CHAINED]) == last_traceback(CHAINED)


def test_without_a_traceback_the_last_lines_are_kept():
    assert last_traceback([f"line {i}" for i in range(30)]).splitlines() == [
        f"line {i}" for i in range(20, 30)
    ]
    assert last_traceback([]) == ""


def test_signals_become_128_and_n():
    assert (exit_code(-9), exit_code(7)) == (137, 7)
    assert (reason(-9), reason(7)) == ("was killed by SIGKILL", "exited with code 7")


def test_a_failure_survives_the_store():
    failure = Failure("n2", 3, 7, "exited with code 7", "Tracé\n  x", "/x.log")
    assert Failure.loads(failure.dumps()) == failure
    assert failure.report().splitlines()[0] == "first failure: rank 3 on n2 exited with code 7"
