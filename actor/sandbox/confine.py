"""The restrictions of a process by Landlock and seccomp, taken by the process itself; it cannot give them back.

The text of this file is run in the sandbox by `inside.py`, so it imports what the interpreter has and nothing of this project.
"""

import ctypes
import os
import struct

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of Landlock's system calls, on every architecture."""
_VERSION = 1
"""Flag of `landlock_create_ruleset` that asks for the version."""
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = 1, 2, 4, 8, 16, 32
_MAKE_DIR, _MAKE_REG, _REFER, _TRUNCATE, _IOCTL_DEV = 1 << 7, 1 << 8, 1 << 13, 1 << 14, 1 << 15
_FIRST_VERSION = (1 << 13) - 1
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OWN = _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
"""Rights that a rule for a file, and not a folder, may name."""
_TCP, _SCOPES = 3, 3
"""All rights of TCP; all scopes: abstract sockets and signals."""
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
_CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def landlock_version():
    """Return the version of Landlock's interface; 0 where the kernel has none, or it is switched off."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)))


def confine(parent, folder, read, write, filter):
    """Give up all rights but to read and write below these paths, and the system calls that the seccomp filter denies.

    The process ends with `parent`.
    """
    _call(_libc.prctl, _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    _call(_libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _drop_capabilities()
    _restrict_files({**dict.fromkeys(read, _READ), **dict.fromkeys(write, _WRITE_FILE | _READ_FILE), folder: _OWN})
    code = ctypes.create_string_buffer(filter, len(filter))
    program = struct.pack("@HP", len(filter) // 8, ctypes.addressof(code))
    _call(_libc.prctl, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0)


def _restrict_files(rights):
    version = landlock_version()
    handled = _FIRST_VERSION
    if version >= 2:
        handled |= _REFER
    if version >= 3:
        handled |= _TRUNCATE
    if version >= 5:
        handled |= _IOCTL_DEV
    attributes = struct.pack("=QQQ", handled, _TCP, _SCOPES)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = _system_call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path, right in rights.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):  # noqa: PTH112
            right &= _OF_FILES
        _system_call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", right & handled, descriptor), 0)
        os.close(descriptor)
    _system_call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _drop_capabilities():
    """Give up what the administrator may do beyond the owner of a file, such as raising limits."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)
    _call(_libc.capset, header, none)


def _system_call(number, *arguments):
    return _call(_libc.syscall, number, *arguments)


def _call(function, *arguments):
    result = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
