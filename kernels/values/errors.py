"""The errors that blocktune raises on purpose.

    BlocktuneError                    exit code
    ├── UsageError (ValueError)           2   a shape, config, flag or file that breaks a rule
    │   ├── UnknownDeviceError            2   a device that the catalogue does not hold
    │   ├── UnknownKernelError            2   a kernel that the registry does not hold
    │   └── ImportRejectedError           2   a results file with unknown fields or absurd values
    ├── NoFeasibleConfigError             3   every candidate was dropped, failed or was wrong
    ├── NoDeviceError                     4   no GPU or driver where one is required
    ├── StoreError                        5   the database cannot serve
    │   ├── StoreLockedError              5   another process holds the lock
    │   ├── StoreCorruptError             5   not a database, or a damaged one
    │   ├── ForeignStoreError             5   a database of another program
    │   └── SchemaTooNewError             5   written by a newer blocktune
    └── VerificationError                 7   a result that differs from the reference

A message has three parts: the rule, the values that broke it, the way out.
"""

from typing import ClassVar


class BlocktuneError(Exception):
    """Root of the tree; `exit_code` is what the command line returns."""

    exit_code: ClassVar[int] = 1


class UsageError(BlocktuneError, ValueError):
    """An argument breaks a rule."""

    exit_code = 2


class UnknownDeviceError(UsageError):
    """A device name or compute capability is not in the catalogue."""


class UnknownKernelError(UsageError):
    """A kernel name is not in the registry."""


class ImportRejectedError(UsageError):
    """A results file has unknown fields or values out of range."""


class NoFeasibleConfigError(BlocktuneError):
    """No configuration fits, compiles and computes the right result."""

    exit_code = 3


class NoDeviceError(BlocktuneError):
    """A GPU or its driver is required and absent."""

    exit_code = 4


class StoreError(BlocktuneError):
    """The database cannot serve."""

    exit_code = 5


class StoreLockedError(StoreError):
    """Another process holds the database lock."""


class StoreCorruptError(StoreError):
    """The file is no database, or a damaged one."""


class ForeignStoreError(StoreError):
    """The database belongs to another program."""


class SchemaTooNewError(StoreError):
    """The database was written by a newer blocktune."""


class VerificationError(BlocktuneError):
    """A computed result differs from the reference."""

    exit_code = 7
