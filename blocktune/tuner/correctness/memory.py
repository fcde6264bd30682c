"""The device memory that checking and timing a shape takes. It imports no torch: a search asks before it needs any."""

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.features import NO_FEATURES, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Direction

MAX_REFERENCE_BYTES = 1 << 30
CHUNK_SCORES = 1 << 26
"""Scores of one reference chunk: 256 MiB in float32, a few times that with temporaries."""
ROWS_PER_TILE = 64


def required_bytes(shape: AttentionShape) -> int:
    """Return the bytes of device memory that checking and timing the shape takes, roughly and from above."""
    query_bytes = shape.batch * shape.num_heads * shape.seqlen_q * shape.head_dim * shape.element_bytes
    out_elements = shape.batch * shape.num_heads * shape.seqlen_q * shape.head_dim_v
    out_bytes = out_elements * shape.out_bytes
    scores = 4 * max(CHUNK_SCORES, ROWS_PER_TILE * shape.seqlen_k)
    key_copies = 4 * shape.seqlen_k * (shape.head_dim + shape.head_dim_v)
    # hard queries, the anchor's output, the mask of finite values, two references with temporaries, a chunk's scores
    if shape.direction is Direction.BACKWARD:  # the hard question's inputs, and the float32 forward of every head
        out_bytes += 2 * shape.tensor_bytes + 8 * out_elements
    if shape.features != NO_FEATURES:  # a mask of all pairs, where it is given, and more temporaries of a chunk
        pairs = shape.seqlen_q * shape.seqlen_k * shape.element_bytes
        out_bytes += (pairs if shape.features.mask in (MaskKind.BOOLEAN, MaskKind.ADDITIVE) else 0) + 8 * scores
    extra = query_bytes + out_bytes + out_elements + 2 * MAX_REFERENCE_BYTES + 4 * (scores + key_copies)
    return shape.tensor_bytes + extra


def require_memory(shape: AttentionShape, device: DeviceSpec) -> None:
    """Check that the shape's tensors and what checking needs fit the device.

    Raises:
        UsageError: they do not.
    """
    needed = required_bytes(shape)
    if device.memory_bytes is not None and needed > device.memory_bytes:
        raise UsageError(
            f"`memory of a shape <= memory of the device` must hold, but {shape.label} needs about "
            f"{needed / 2**30:.1f} GiB to be checked and timed and {device.name} has "
            f"{device.memory_bytes / 2**30:.1f} GiB. Take a smaller batch, fewer heads or a shorter sequence."
        )
