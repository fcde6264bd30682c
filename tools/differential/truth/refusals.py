"""Calls that something is wrong with: PyTorch's attention and ours must give the same answer."""

from typing import Any

import torch
from torch import Tensor

from tools.differential.cases.case import Case
from tools.differential.cases.tensors import Inputs


def refusal(case: Case, inputs: Inputs) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of the wrong call: query, key and value, and by name."""
    query, key, value = (view.tensor for view in (inputs.query, inputs.key, inputs.value))
    options: dict[str, Any] = {"is_causal": case.kind.causal, "scale": case.scale, "enable_gqa": case.kind.group > 1}
    options["attn_mask"] = inputs.mask
    plain = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=query.device)
    if case.wrong == "head_dim":
        key = torch.cat((key, key[..., :1]), -1)
    elif case.wrong == "length":
        value = torch.cat((value, value[:, :, :1]), 2)
    elif case.wrong == "key_type":
        key = key.to(torch.float16 if key.dtype is not torch.float16 else torch.bfloat16)
    elif case.wrong == "integers":
        query, key, value = (tensor.nan_to_num(0, 0, 0).clamp(-9, 9).int() for tensor in (query, key, value))
    elif case.wrong == "mask_type":
        options |= {"attn_mask": plain.long(), "is_causal": False}
    elif case.wrong == "mask_shape":
        options |= {"attn_mask": plain.new_ones(case.seqlen_q + 2, case.seqlen_k), "is_causal": False}
    elif case.wrong == "mask_and_causal":
        options |= {"attn_mask": plain, "is_causal": True}
    elif case.wrong == "heads":
        options["enable_gqa"] = not options["enable_gqa"]
    elif case.wrong == "dropout":
        options["dropout_p"] = 1.5
    elif case.wrong == "rank":
        query = query[0, 0] if case.batch else query
    elif case.wrong == "device":
        key = key.cpu()
    elif case.wrong == "batch":
        key = torch.cat((key, key))
    return [query, key, value], options
