"""`python -m benchmarks.report`."""

from . import main

if __name__ == "__main__":
    main()
