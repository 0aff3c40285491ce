import pytest

collect_ignore_glob = ["scripts/*"]  # which are audited, and import what lies beside them


@pytest.fixture(autouse=True)
def _own_objects(own_objects):
    pass
