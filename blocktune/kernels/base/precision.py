"""How exactly our kernels multiply float32 tensors: as PyTorch's settings ask for it.

`torch.set_float32_matmul_precision`, `torch.backends.cuda.matmul.allow_tf32` and its `fp32_precision` are three ways to
say whether a product may round its factors to TF32. Where it may not, which is PyTorch's default, every factor is split
into two TF32 numbers and three products are added: 22 bits of the 24 of float32. Where it may, the forward takes one
product of 11 bits. Gradients always take three: a tensor core cuts the factors of one off instead of rounding them, and
over the five products of a backward that adds up to more than three times the error of PyTorch's mathematics. Products
of 16-bit tensors are exact either way.
"""

import sys

ONE_PRODUCT, THREE_PRODUCTS = "tf32", "tf32x3"
"""Triton's names."""


def allows_tf32() -> bool:
    """Return whether PyTorch may round the factors of float32 products on a GPU now; not where PyTorch is not
    loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


def product_precision(dtype: str) -> str:
    """Return Triton's `input_precision` of a forward for tensors of this data type now."""
    return THREE_PRODUCTS if dtype == "float32" and not allows_tf32() else ONE_PRODUCT


def is_one_product(dtype: str) -> bool:
    """Return whether a forward multiplies float32 tensors by one product of TF32 numbers now."""
    return dtype == "float32" and product_precision(dtype) == ONE_PRODUCT


def gradient_precision(dtype: str) -> str:
    """Return Triton's `input_precision` of a backward for tensors of this data type."""
    return THREE_PRODUCTS if dtype == "float32" else ONE_PRODUCT
