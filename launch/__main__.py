"""`python -m shardclip.launch` is the command `shardclip-launch`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
