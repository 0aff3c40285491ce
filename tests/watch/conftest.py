import pytest


@pytest.fixture(autouse=True)
def _own_objects(own_objects):
    pass
