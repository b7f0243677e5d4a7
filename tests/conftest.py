"""What every test shares: the pool of ranks ends with the session."""

import os
from contextlib import suppress

import pytest
import torch

from tests.ranks import close_pools

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: its kernels run on CPU

for colours in ("FORCE_COLOR", "MYPY_FORCE_COLOR"):
    os.environ.pop(colours, None)  # tests read what programs print

with suppress(ImportError):  # the environment with the frameworks has none
    from hypothesis import HealthCheck, settings

    # a loaded machine is no fault, and what fails once fails again
    settings.register_profile(
        "calm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("calm")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)  # whichever tests ran before in this process


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session():
    yield
    close_pools()
