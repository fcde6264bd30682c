"""What tests of several Hopper kernels share."""

import pytest


@pytest.fixture
def decodes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the cases of decoding on the CPU: these tests run a kernel's source there."""
    from tests.kernels.portable.decode import test_flash_decode
    from tests.kernels.portable.decode8 import test_flash_decode8

    for module in (test_flash_decode, test_flash_decode8):
        monkeypatch.setattr(module, "DEVICE", "cpu")
