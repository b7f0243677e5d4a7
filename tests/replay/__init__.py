"""A replay of the layouts' tests: what travels and what comes out, before a change and after it.

`make replay BASE=REVISION` runs the tests that use real ranks twice, with the code and tests of the
revision and with those of the working tree. A recorder inside the ranks writes down, call by call,
the payload that was sent, the plan behind it (seats, buckets, parts) and the gradients afterwards.
Both records must be the same, byte for byte: a refactoring changes nothing.
"""
