"""What was built is removed at the end."""

import pytest

from tests.packaging import built


@pytest.fixture(scope="session", autouse=True)
def _removed():
    yield
    built.remove()
