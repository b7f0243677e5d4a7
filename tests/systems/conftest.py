"""The frameworks are imported once for all ranks."""

import os

from tests.ranks.nursery import PRELOAD

os.environ[PRELOAD] = "tests.systems.preload"
