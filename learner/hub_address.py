"""The address at which actors reach the hub, written into the file that `hub.address` may name."""

import logging

from offbeat.common.errors import SettingError
from offbeat.common.processes.durable_files import replace
from offbeat.protocols.addresses import address_file, reachable

logger = logging.getLogger(__name__)


def tell_address(setting: str, bound: str) -> str:
    """Return the address at which actors reach the hub, after writing it into the file that `hub.address` may name."""
    file = address_file(setting)
    if file is None:
        return setting
    address = reachable(bound)
    try:
        replace(file, f"{address}\n".encode())
    except OSError as error:
        problem = f"the file cannot be written ({error.strerror})"
        raise SettingError(
            "hub.address", setting, problem, "Name a file in a folder that exists and all machines see."
        ) from error
    logger.info("actors find the hub at %s, as %s says", address, file)
    return address
