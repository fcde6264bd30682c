"""The errors that blocktune raises on purpose.

    BlocktuneError                    exit code
    ├── UsageError                        2   a shape, config, flag or file that breaks a rule
    │   ├── TooFewDimensionsError         2   a tensor with fewer dimensions than its place needs
    │   ├── WrongTypeError                2   an argument of a Python type that its place does not take
    │   ├── MissingPackageError           2   a package that an extra of blocktune brings
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
    ├── NothingMeasuredError              6   no result yet to show or write
    ├── VerificationError                 7   a result that differs from the reference
    ├── ConfigFlawError                   8   a config that a check does not allow
    └── RankError                         1   another rank of a group does not take part

A message has three parts: the rule, the values that broke it, the way out.

`blocktune.attention` stands where PyTorch's attention stood, and the `flash_attn` functions where flash-attention's
did, so that their callers may catch what those raise. Their checks raise RuntimeError for values, sizes and data types,
IndexError for a tensor with too few dimensions and TypeError for an argument of another Python type. A UsageError is a
RuntimeError for them, and a ValueError because that is what Python calls a wrong value.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class BlocktuneError(Exception):
    """Root of the tree; `exit_code` is what the command line returns."""

    exit_code: ClassVar[int] = 1


class UsageError(BlocktuneError, ValueError, RuntimeError):
    """An argument breaks a rule; a RuntimeError as well, as PyTorch's checks raise."""

    exit_code = 2


class TooFewDimensionsError(UsageError, IndexError):
    """A tensor lacks a dimension, which PyTorch looks for and does not find: a mask with fewer than two, or query, key
    and value of a function that takes them with three or four."""


class WrongTypeError(UsageError, TypeError):
    """An argument is no tensor or no number. `attention` leaves the types of its arguments to PyTorch, which raises a
    TypeError of its own."""


class MissingPackageError(UsageError, ImportError):
    """A package is missing that an extra of blocktune brings; an ImportError as well, as its import raises."""


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


class NothingMeasuredError(BlocktuneError):
    """There is no result yet that a command could show or write."""

    exit_code = 6


class VerificationError(BlocktuneError):
    """A computed result differs from the reference."""

    exit_code = 7


class ConfigFlawError(BlocktuneError):
    """A config spills, cannot run or has the code of another one, which a check does not allow."""

    exit_code = 8


class RankError(BlocktuneError, RuntimeError):
    """Another rank of a group ended, or does something else; a RuntimeError as well, as torch.distributed raises."""


def require_type(name: str, given: object, kind: type, way_out: str) -> None:
    """Check the type of an argument that would otherwise be met as wrong far from the caller's line; `way_out` ends the
    message.

    Raises:
        WrongTypeError: it has another type.
    """
    if not isinstance(given, kind):
        raise WrongTypeError(f"`{name}` must be of type {kind.__name__}, but got {given!r:.100}. {way_out}")


NO_EXTRA = ("", "blocktune", "torch", "triton")
"""What fails to be imported for another reason than that an extra is missing."""


@contextmanager
def needing(extra: str, purpose: str) -> Iterator[None]:
    """Let an import that fails in the block say which extra of blocktune brings the package; `purpose` begins the
    message.

    Raises:
        MissingPackageError: a package cannot be imported.
    """
    try:
        yield
    except MissingPackageError:
        raise
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in NO_EXTRA:
            raise
        state = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported: {error}"
        raise MissingPackageError(
            f'{purpose} needs {package}, but {package} {state}. Install it: pip install "blocktune[{extra}]"'
        ) from error
