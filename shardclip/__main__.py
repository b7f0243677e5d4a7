"""``python -m shardclip``: the command ``shardclip``."""

import sys

from .cli import main

sys.exit(main())
