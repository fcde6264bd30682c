"""The gradient of an additive mask compiled for GPUs that are not here: its tile fits the shared memory."""

import pytest

from blocktune.kernels.base.feature_arguments import example_arguments, run_time_sizes
from blocktune.kernels.base.specialize import TensorArgument, named_in_units, specialize
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.portable.backward.base import input_strides, tile_constants
from blocktune.kernels.portable.backward.bias import bias_tile
from blocktune.kernels.portable.backward.bias_kernel import bias_kernel
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.compile.compiler import compiled_code, resources_of
from tests.support.triton_modes import compiled_here


@compiled_here
@pytest.mark.few(2)
@pytest.mark.parametrize("cc", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(32, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float32")]
)
def test_the_tile_fits_the_shared_memory(cc: tuple[int, int], head_dim: int, dtype: str) -> None:
    shape = AttentionShape(
        batch=8, num_heads=4, num_heads_kv=4, seqlen_q=512, seqlen_k=512, head_dim=head_dim, head_dim_v=head_dim,
        dtype=dtype, direction=Direction.BACKWARD, features=Features.parse("additive"),
    )  # fmt: skip
    most = limits_for(cc).shared_per_block_optin_bytes
    tile = bias_tile(shape, most)
    given = dict.fromkeys(("Q", "K", "V", "Dout"), TensorArgument(dtype))
    given |= dict.fromkeys(("Lse", "Delta", "Dmask"), TensorArgument("float32"))
    given |= example_arguments(shape) | named_in_units(input_strides(shape)) | run_time_sizes(shape, 1, 1)
    given |= {"own_heads": 4, "batches": 8, "heads": 1, "parts": 4, "ONE_ROW": False}
    given |= {"OPTIONS": tile_constants(shape, tile.block_m, tile.block_n, tile.num_stages)}
    arguments = {name: value for name, value in given.items() if name in bias_kernel.arg_names}
    resources = resources_of(compiled_code(specialize(bias_kernel, arguments, {"num_warps": tile.num_warps}), cc), "")
    assert resources.shared_bytes <= most
