"""Which tests one worker process of pytest-xdist runs: the ordinary ones of a file, and each exhaustive one by itself.

What the tests of a file share, such as a server or a browser, is made once then, and of many long cases all workers
take some. A group that a test names itself stays.
"""

import os

import pytest


def file_of(item: pytest.Item) -> str:
    """Return the path of a case's file. `location` says it too, but reads the file to find the case's line."""
    return item.nodeid.partition("::")[0]


def keep_files_together(items: list[pytest.Item]) -> None:
    """Group the tests of every file that are not exhaustive, for `--dist loadgroup`."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # its marker may not even be known
        return
    for item in items:
        if not any(map(item.get_closest_marker, ("exhaustive", "xdist_group"))):
            item.add_marker(pytest.mark.xdist_group(file_of(item)))
