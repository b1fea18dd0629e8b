"""The services that the tests of chaos start."""

from tests.deploy.conftest import services, warm

__all__ = ["services", "warm"]
