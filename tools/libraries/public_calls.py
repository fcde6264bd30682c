"""Public functions of packages of Triton kernels, called as a user would: `--call tools.libraries.public_calls:NAME`.

Packages are imported when a function is called, so that they find the GPU that stands in.
"""

import os
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

CUDA, BF16, FP16 = "cuda", torch.bfloat16, torch.float16
FP8 = torch.float8_e4m3fn
LONG = 32_768
"""Tokens of a second length, which the keys of fla's kernels do not tell from the first."""


def _random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=dtype).requires_grad_()


def _back(out: Tensor | tuple[Tensor, ...]) -> None:
    first = out[0] if isinstance(out, tuple) else out
    first.backward(torch.ones_like(first))


def fla_delta_rule(tokens: int = 512) -> None:
    from fla.ops.delta_rule import chunk_delta_rule

    q, k, v = (_random(1, tokens, 4, 128) for _ in range(3))
    _back(chunk_delta_rule(q, k, v, torch.rand(1, tokens, 4, device=CUDA, dtype=BF16), use_qk_l2norm_in_kernel=True))


def fla_delta_rule_long() -> None:
    fla_delta_rule(LONG)


def fla_gla(tokens: int = 512) -> None:
    from fla.ops.gla import chunk_gla

    q, k, v, gate = (_random(1, tokens, 4, 128) for _ in range(4))
    _back(chunk_gla(q, k, v, functional.logsigmoid(gate)))


def fla_gla_long() -> None:
    fla_gla(LONG)


def fla_norms() -> None:
    from fla.modules.norm.layernorm import layer_norm, rms_norm

    x, weight = _random(1, 512, 1024), _random(1024)
    _back(rms_norm(x, weight, None))
    _back(layer_norm(_random(1, 512, 128), _random(128), _random(128)))


def fla_hgrn() -> None:
    from fla.ops.hgrn import chunk_hgrn

    _back(chunk_hgrn(_random(1, 512, 1024), functional.logsigmoid(_random(1, 512, 1024))))


def liger_dyt() -> None:
    from liger_kernel.ops.dyt import LigerDyTFunction

    _back(LigerDyTFunction.apply(_random(1, 512, 4096), _random(1), _random(4096), _random(4096)))


def liger_norms() -> None:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    _back(LigerRMSNormFunction.apply(_random(512, 4096), _random(4096), 1e-6))
    _back(LigerLayerNormFunction.apply(_random(512, 4096), _random(4096), _random(4096), 1e-6))


def liger_losses() -> None:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    _back(LigerCrossEntropyFunction.apply(_random(128, 32000), torch.randint(32000, (128,), device=CUDA), None))
    _back(LigerKLDivLossFunction.apply(_random(128, 4096), torch.rand(128, 4096, device=CUDA, dtype=BF16)))


def liger_activations() -> None:
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    _back(LigerSiLUMulFunction.apply(_random(512, 11008), _random(512, 11008)))
    _back(LigerGELUMulFunction.apply(_random(512, 11008), _random(512, 11008)))


def adasplash_attention() -> None:
    from adasplash import adasplash_no_block_mask, adasplash_v1

    for attend in (adasplash_v1, adasplash_no_block_mask):
        _back(attend(_random(1, 2, 512, 64), _random(1, 2, 512, 64), _random(1, 2, 512, 64)))


def adasplash_entmax() -> None:
    from adasplash import triton_entmax_v1

    _back(triton_entmax_v1(_random(256, 1024, dtype=torch.float32)))


def moe_ops_routing() -> None:
    from moe_ops import fused_topk_softmax, permute, unpermute

    _back(fused_topk_softmax(_random(512, 16), 2))
    rows, chosen = _random(512, 1024), torch.randint(16, (512, 2), device=CUDA, dtype=torch.int32)
    permuted, row_map, *_ = permute(rows, chosen, 0, 16)
    _back(unpermute(permuted, row_map, _random(512, 2, dtype=torch.float32), 512, 2))


def moe_ops_gemm() -> None:
    from moe_ops.grouped_gemm_ops import grouped_gemm

    ends = torch.arange(64, 513, 64, device=CUDA, dtype=torch.int32)
    _back(grouped_gemm(_random(512, 1024), _random(8, 512, 1024), ends))


def torchao_int8() -> None:
    from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm

    a, b = (torch.randint(-8, 8, (1024, 1024), device=CUDA, dtype=torch.int8) for _ in range(2))
    scaled_int8_mm(a, b.T, torch.rand(1024, device=CUDA, dtype=BF16), torch.rand(1024, device=CUDA, dtype=BF16))


def torchao_fp8_training() -> None:
    from torchao.prototype.blockwise_fp8_training import kernels

    x = torch.randn(512, 1024, device=CUDA, dtype=BF16)
    weight = torch.randn(1024, 1024, device=CUDA, dtype=BF16)
    a, a_scale = kernels.triton_fp8_blockwise_act_quant_lhs(x)
    b, b_scale = kernels.triton_fp8_blockwise_weight_quant_transposed_rhs(weight)
    kernels.triton_fp8_gemm_1x128_128x128(a, b, a_scale, b_scale)
    kernels.triton_fp8_blockwise_act_quant_transposed_lhs(x)
    kernels.triton_fp8_blockwise_act_quant_rhs(x)
    kernels.triton_fp8_blockwise_weight_quant_rhs(weight)


def torchao_fp8_blocks() -> None:
    from torchao.kernel import blockwise_quantization as blocks

    x, weight = torch.randn(512, 1024, device=CUDA, dtype=BF16), torch.randn(1024, 1024, device=CUDA, dtype=BF16)
    a, a_scale = blocks.fp8_blockwise_act_quant(x)
    b, b_scale = blocks.fp8_blockwise_weight_quant(weight)
    blocks.fp8_blockwise_weight_dequant(b, b_scale)
    blocks.blockwise_fp8_gemm(a, a_scale, b, b_scale)


def flashlib_norms() -> None:
    from flashlib import flash_layernorm, flash_rmsnorm

    x, weight = torch.randn(512, 1024, device=CUDA, dtype=BF16), torch.ones(1024, device=CUDA, dtype=BF16)
    flash_rmsnorm(x, weight)
    flash_layernorm(x, weight, torch.zeros_like(weight))


def flashlib_distances() -> None:
    from flashlib import cov_gemm, flash_standard_scaler, gram_gemm

    x = torch.randn(512, 128, device=CUDA, dtype=torch.float32)
    cov_gemm(x)
    gram_gemm(x)
    flash_standard_scaler(x)


def mlstm_parallel() -> None:
    from mlstm_kernels.torch.parallel.triton_limit_headdim import mlstm_parallel__limit_headdim

    q, k, v = (_random(1, 2, 512, 64, dtype=torch.float32) for _ in range(3))
    gates = [_random(1, 2, 512, dtype=torch.float32) for _ in range(2)]
    _back(mlstm_parallel__limit_headdim(q, k, v, *gates, autocast_kernel_dtype=BF16))


def mlstm_chunkwise() -> None:
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk

    q, k, v = (_random(1, 2, 512, 64, dtype=torch.float32) for _ in range(3))
    gates = [_random(1, 2, 512, dtype=torch.float32) for _ in range(2)]
    _back(mlstm_chunkwise__xl_chunk(q, k, v, *gates, autocast_kernel_dtype=BF16))


def sigmoid_attention() -> None:
    from triton_sigmoid.sigmoid_triton_dense import sigmoid_attention as attend

    _back(attend(*(_random(1, 512, 2, 64, dtype=FP16) for _ in range(3))))


def gemlite_int4() -> None:
    from gemlite.helper import A16Wn

    weights = torch.randint(0, 15, (512, 1024), device=CUDA, dtype=torch.uint8)
    scales = torch.rand(512 * 1024 // 128, 1, device=CUDA, dtype=FP16)
    layer = A16Wn(device="cuda:0", dtype=FP16).from_weights(weights, scales, 8 * torch.ones_like(scales), 4, 128)
    for rows in (1, 8, 256):
        layer.forward(torch.randn(rows, 1024, device=CUDA, dtype=FP16))


def conch_layers() -> None:
    from conch.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
    from conch.ops.activation.silu_and_mul import silu_and_mul
    from conch.ops.normalization.gemma_rms_norm import gemma_rms_norm
    from conch.ops.normalization.rms_norm import fused_add_rms_norm, rms_norm

    x, weight = torch.randn(64, 4096, device=CUDA, dtype=FP16), torch.ones(4096, device=CUDA, dtype=FP16)
    gelu_tanh_and_mul(x.float())  # its tanh has no form of 16 bits
    silu_and_mul(x)
    rms_norm(x, weight, 1e-6)
    fused_add_rms_norm(x, x.clone(), weight, 1e-6)
    gemma_rms_norm(x, weight, 1e-6)


def cut_cross_entropy() -> None:
    from cut_cross_entropy import linear_cross_entropy

    words = torch.randint(32000, (512,), device=CUDA)
    _back(linear_cross_entropy(_random(512, 1024), _random(32000, 1024), words))


def flag_gems_operators() -> None:
    os.environ.setdefault("GEMS_VENDOR", "nvidia")  # else it looks for NVIDIA's tools
    if "FLAGGEMS_CACHE_DIR" not in os.environ:  # what was chosen before is not tuned
        os.environ["FLAGGEMS_CACHE_DIR"] = tempfile.mkdtemp(prefix="flag-gems-")
    import flag_gems

    x, y = (torch.randn(512, 1024, device=CUDA, dtype=FP16) for _ in range(2))
    flag_gems.mm(x, y.T)
    flag_gems.softmax(x, 1)
    flag_gems.layer_norm(x, (1024,), x[0], x[1])
    flag_gems.sum(x)


Call = Callable[[], None]

CALLS: dict[str, tuple[Call, ...]] = {
    "fla-core": (fla_norms, fla_hgrn, fla_delta_rule, fla_gla),
    "liger-kernel": (liger_dyt, liger_norms, liger_losses, liger_activations),
    "adasplash": (adasplash_attention, adasplash_entmax),
    "moe-ops": (moe_ops_routing, moe_ops_gemm),
    "torchao": (torchao_int8, torchao_fp8_training, torchao_fp8_blocks),
    "flashlib": (flashlib_norms, flashlib_distances),
    "mlstm-kernels": (mlstm_parallel, mlstm_chunkwise),
    "triton-sigmoid": (sigmoid_attention,),
    "gemlite": (gemlite_int4,),
    "conch-triton-kernels": (conch_layers,),
    "cut-cross-entropy": (cut_cross_entropy,),
    "flag-gems": (flag_gems_operators,),
}
"""By the name of the package."""

LONG_CALLS: dict[str, tuple[Call, ...]] = {"fla-core": (fla_delta_rule_long, fla_gla_long)}
"""Calls of the second length, which come after those of the first."""
