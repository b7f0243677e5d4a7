"""Times beside what a user would call instead: `python -m benchmarks --help`."""
