"""What every test shares: the pool of ranks ends with the session."""

import pytest

from tests.ranks import close_pools


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session():
    yield
    close_pools()
