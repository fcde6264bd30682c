"""PyTorch's attention, called so that its backends answer right.

Seen with torch 2.11 and cuDNN 9.19 on compute capability 9.0, where PyTorch prefers cuDNN:

- cuDNN reads a mask of another type than the query's as if it had the query's (pytorch/pytorch#191612), and its
  backward gives NaN for masks and some lengths (pytorch/pytorch#196678).
- cuDNN computes garbage with an address or a stride that is no multiple of 16 bytes (a relative error above 1), and the
  memory-efficient backend raises.
- The memory-efficient backend reads a mask that all keys share at a misaligned address, which ends the CUDA context.
- The fused backends take a row's maximum before they scale it, so that a negative scale overflows.
- cuDNN returns nothing for a batch of none.
- Under `torch.vmap` the memory-efficient backend takes a mask's shape as if the mask were mapped like the query.

Seen with torch 2.13 on the CPU:

- The fused backend reads a float32 mask as if it had the type of a float64 query.
- The fused backend takes the number of keys from the key, and reads past the end of a value that has fewer. PyTorch's
  mathematics raise. On an H200 a process died once around a call whose value had one key more.
- The fused backend's backward takes exp(score - lse), and a log-sum-exp holds no log(n) next to the least finite
  number. Where an additive mask hides all n keys of a row with finite numbers, gradients of values are n times too
  large.

Tensors whose last dimension is not contiguous are PyTorch's mathematics' alone, and stay so.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as functorch_transform
from torch.backends import cuda as backends
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from blocktune.kernels.hardware.side_thread import run_on_side_thread
from blocktune.runtime.dispatch.launches.kinds import ALIGNMENT_BYTES
from blocktune.runtime.dispatch.obstacles import needs_gradients
from blocktune.runtime.dispatch.sdpa_arguments import SdpaArguments, with_positive_scale

scaled_dot_product_attention = functional.scaled_dot_product_attention
"""PyTorch's own, taken here once: a user may put `blocktune.attention` in its place."""

HALVES = (torch.float16, torch.bfloat16)
LOWEST = -(2.0**21)
"""Below it a log-sum-exp of float32 is rounded by 1/8 and more."""
FUSED_DEVICE = "cuda"
"""Where the backends are that all of this is about."""
FIRST_REFUSING = "2.14.0.dev0"
"""The first PyTorch that refuses a mask together with is_causal whatever its backend (pytorch/pytorch#187801). Nightly
builds, which come before 2.14 as versions are ordered, answer as they do: nothing is merged for them."""
REFUSES_BOTH = torch.__version__ >= FIRST_REFUSING


def call_sdpa(given: SdpaArguments) -> Tensor:
    """Return PyTorch's attention, by whichever of its backends it takes."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = given
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def unconverted_attention(given: SdpaArguments) -> Tensor:
    """Return PyTorch's attention of arguments that PyTorch itself refuses or converts, or that `torch.func`
    transforms."""
    with _sound_backends(*given[:4]):
        return call_sdpa(given)


def torch_attention(given: SdpaArguments) -> Tensor:
    """Return PyTorch's attention, of copies where its backends would read the tensors wrong, and by those that are
    right."""
    query, key, value = _realign(*given[:3])
    given = given._replace(query=query, key=key, value=value)
    if _takes_both(given):
        mask = _with_diagonal(given.attn_mask, query.shape[-2], key.shape[-2])
        given = given._replace(attn_mask=mask, is_causal=False)
    with _right_backends(*given[:4]):
        return sound_attention(given)


def bind_sdpa(given: SdpaArguments) -> Callable[..., Tensor]:
    """Return PyTorch's attention with the options of a call, as a function of query, key, value and, where the call has
    one, mask. The tensors are not kept."""
    if _is_sound(given):
        options: dict[str, Any] = dict(zip(SdpaArguments._fields[4:], given[4:], strict=True))
        return partial(scaled_dot_product_attention, **options)
    rest = given[4:]
    return lambda query, key, value, mask=None: torch_attention(SdpaArguments(query, key, value, mask, *rest))


def _is_sound(given: SdpaArguments) -> bool:
    """Return whether PyTorch's attention answers calls with such tensors right as it is, without copies of them and by
    all of its backends."""
    query, key, value, mask, *_, scale, _ = given
    return (
        (mask is None or _is_sound_mask(given, mask))
        and (scale is None or scale > 0)
        and isinstance(_right_backends(query, key, value, mask), nullcontext)
        and all(kept is own for kept, own in zip(_realign(query, key, value), given, strict=False))
    )


def _is_sound_mask(given: SdpaArguments, mask: Tensor) -> bool:
    """Return whether PyTorch's backends on a GPU read such a mask right, whatever is in it."""
    query, key = given.query, given.key
    is_alone = query.device.type == FUSED_DEVICE and key.dim() > 1 and not given.is_causal
    return is_alone and mask.dtype in (torch.bool, query.dtype) and one_for_each_key(mask, key.shape[-2]) is mask


def prepare_blas(device: torch.device) -> None:
    """Have cuBLAS handles for this thread and for autograd's, which a thread takes from PyTorch's pool at its first
    product. A handle that is created while a CUDA graph is captured ends the capture."""
    run_on_side_thread(torch.cuda.current_blas_handle, device)  # back in the pool when the thread ends
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()
    run_on_side_thread(torch.cuda.current_blas_handle, device)


def sdpa_backend(given: SdpaArguments) -> int:
    """Return the `SDPBackend` that PyTorch chooses for a call; `ERROR` where there is none, or not a right one."""
    chosen = _chosen_backend(given)
    with _right_backends(*given[:4]):
        return chosen if _chosen_backend(given) == chosen else SDPBackend.ERROR.value


def _chosen_backend(given: SdpaArguments) -> int:
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = given
    return int(
        torch._fused_sdp_choice(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    )


def _right_backends(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> AbstractContextManager[Any]:
    """Return what leaves PyTorch the backends that answer such a call right."""
    mathematics: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    if _differ_in_keys(key, value):
        return mathematics
    if query.device.type != FUSED_DEVICE:
        return mathematics if needs_gradients(query, key, value) and _hides_rows(mask) else nullcontext()
    is_foreign = mask is not None and mask.is_floating_point() and mask.dtype is not query.dtype
    if is_foreign or not all(tensor.numel() for tensor in (query, key, value)):
        return mathematics
    is_cudnn_possible = mask is not None and query.dtype in HALVES
    return _without_cudnn() if is_cudnn_possible else nullcontext()


def _hides_rows(mask: Tensor | None) -> bool:
    """Return whether an additive mask on the CPU may hide a row with finite numbers alone. Of one whose numbers are not
    to be looked at, it may."""
    if mask is None or mask.dim() == 0 or not mask.is_floating_point() or not mask.numel():
        return False
    if mask.layout is not torch.strided or mask.device.type != "cpu":
        return False  # PyTorch refuses it, or computes it by its mathematics
    if is_tracing() or dispatch_modes() or functorch_transform() is not None or type(mask) is not Tensor:
        return True
    highest = mask.detach().amax(-1)
    return bool(((highest < LOWEST) & (highest > float("-inf"))).any())


def _takes_both(given: SdpaArguments) -> bool:
    """Return whether it is a call with a mask and is_causal on a GPU that PyTorch computes. Its mathematics refuse
    both, and where cuDNN is left out they may be all that remains."""
    query, mask = given.query, given.attn_mask
    if REFUSES_BOTH or mask is None or given.is_causal is not True or query.device.type != FUSED_DEVICE:
        return False
    if mask.dim() < 2 or mask.dtype not in (torch.bool, query.dtype):
        return False
    return bool(_chosen_backend(given) > SDPBackend.MATH.value)


def _with_diagonal(mask: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return a mask that holds what PyTorch's is_causal lets through as well."""
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=mask.device).tril()
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, float("-inf"))


def _sound_backends(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> AbstractContextManager[Any]:
    """Return what leaves PyTorch the backends that read no value past its end, and keep a mask's own batch under the
    transforms of `torch.func`. The arguments may be of any types."""
    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value)):
        return nullcontext()  # PyTorch refuses them
    is_mapped = mask is not None and query.device.type == FUSED_DEVICE and functorch_transform() is not None
    mathematics: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    return mathematics if is_mapped or _differ_in_keys(key, value) else nullcontext()


def _differ_in_keys(key: Tensor, value: Tensor) -> bool:
    """Return whether key and value differ in more than their last dimension."""
    if is_tracing() or key.is_nested or value.is_nested:  # the sizes of a trace are tensors
        return False
    return bool(key.shape[:-1] != value.shape[:-1])


def sound_attention(given: SdpaArguments) -> Tensor:
    """Return PyTorch's attention as far as tensor operations alone keep it right; a compiled graph may hold them."""
    query, scale = with_positive_scale(given.query, given.scale)
    _, key, value, attn_mask, dropout_p, is_causal, _, enable_gqa = given
    dtype = query.dtype
    if attn_mask is not None and attn_mask.dtype is torch.float32 and dtype is torch.float64:
        attn_mask = attn_mask.double()
    elif attn_mask is not None and query.device.type == FUSED_DEVICE and key.dim() > 1:
        attn_mask = one_for_each_key(attn_mask, key.shape[-2])
        if attn_mask.dtype is torch.float32 and dtype in HALVES and key.dtype is dtype and value.dtype is dtype:
            query, key, value = (tensor.to(torch.float32) for tensor in (query, key, value))
    sound = SdpaArguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return call_sdpa(sound).to(dtype)


def one_for_each_key(mask: Tensor, seqlen_k: int) -> Tensor:
    """Return a mask that all keys share, with an element for each of them in memory; other masks as they are."""
    if (
        mask.dim() < 2
        or seqlen_k < 2
        or mask.layout is not torch.strided
        or (mask.shape[-1] == seqlen_k and mask.stride(-1) != 0)
    ):
        return mask
    own = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    return own.expand(*own.shape[:-1], seqlen_k).contiguous()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Leave out cuDNN, and allow the mathematics in case that it was the only backend allowed."""
    before = backends.cudnn_sdp_enabled(), backends.math_sdp_enabled()
    backends.enable_cudnn_sdp(False)
    backends.enable_math_sdp(True)
    try:
        yield
    finally:
        backends.enable_cudnn_sdp(before[0])
        backends.enable_math_sdp(before[1])


def _realign(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, copied where 16 does not divide their addresses and strides in bytes. Heads whose own bytes
    16 does not divide stay: no copy aligns them, and PyTorch pads them or takes a backend that reads them."""
    if dispatch_modes() or functorch_transform() is not None or not all(map(_is_plain, tensors)):
        return tensors
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        return tensors
    if any(tensor.shape[-1] * tensor.element_size() % ALIGNMENT_BYTES for tensor in tensors):
        return tensors
    return tuple(
        tensor if _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors
    )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether it has an address and strides."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == FUSED_DEVICE
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.dim() > 0
    )


def _is_aligned(tensor: Tensor) -> bool:
    steps = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
    return not any(step % ALIGNMENT_BYTES for step in steps)
