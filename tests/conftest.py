"""What every test shares: the pool of ranks ends with the session."""

import os

import pytest
import torch

from tests.ranks import close_pools

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: its kernels run on CPU


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session():
    yield
    close_pools()
