"""The two workers of `./dev test` share no file: xdist knows the groups that tests/conftest.py gives."""

import pytest


def test_group_of_a_test_is_its_file(request: pytest.FixtureRequest) -> None:
    # In the name under which xdist deals it out; pytest 9.2 hides it from xdist 3.8, and every file's fixtures are made twice.
    group = "@tests/test_workers_share_no_file.py" if getattr(request.config.option, "loadgroup", False) else ""
    assert request.node.nodeid == f"tests/test_workers_share_no_file.py::test_group_of_a_test_is_its_file{group}"
