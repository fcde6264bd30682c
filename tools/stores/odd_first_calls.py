"""Call attention on the CPU as if it were a GPU, a few times, in a process whose environment holds anything.

Prints `right`, or ends with an error.
"""

import pytest
import torch

from blocktune import attention
from blocktune.kernels.files import incidents
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention
from tests.support.fakes.dispatch_fakes import pretend_h200, shape_like, tensors

with pytest.MonkeyPatch.context() as patch:
    kernel = pretend_h200(patch)
    for length in (32, 32, 48):
        given = tensors(shape_like(length))
        torch.testing.assert_close(attention(*given), scaled_dot_product_attention(*given))
    attention.reload()
    assert "plain" in str(attention.explain(*given))
    assert kernel.launched
    assert not incidents.counts
print("right")
