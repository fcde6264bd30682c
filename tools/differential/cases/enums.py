"""The functions that are called, the circumstances of calls, and what their tensors hold."""

from enum import StrEnum


class Entry(StrEnum):
    """The functions that are called."""

    SDPA = "attention"
    TRANSFORMERS = "transformers_attention"
    FLASH = "flash_attn_func"
    FLASH_QKV = "flash_attn_qkvpacked_func"
    FLASH_KV = "flash_attn_kvpacked_func"
    VARLEN = "flash_attn_varlen_func"
    VARLEN_QKV = "flash_attn_varlen_qkvpacked_func"
    VARLEN_KV = "flash_attn_varlen_kvpacked_func"
    TORCH_VARLEN = "varlen_attn"
    KVCACHE = "flash_attn_with_kvcache"
    MERGE = "merge_partial"


QKV = (Entry.FLASH_QKV, Entry.VARLEN_QKV)
KV = (Entry.FLASH_KV, Entry.VARLEN_KV)
DENSE = (Entry.FLASH, Entry.FLASH_QKV, Entry.FLASH_KV)
PACKED_SEQUENCES = (Entry.VARLEN, Entry.VARLEN_QKV, Entry.VARLEN_KV, Entry.TORCH_VARLEN)


class Mode(StrEnum):
    """The circumstances of a call."""

    EAGER = "eager"
    NO_GRAD = "no_grad"
    INFERENCE = "inference_mode"
    AUTOCAST = "autocast"
    WARMED = "warmed"  # after calls of the same kind without gradients, with other values, and in inference mode
    DEFAULTS = "defaults"  # while new tensors are float64, and on no device
    STREAM = "stream"
    TWO_STREAMS = "two_streams"  # at once
    GRAPH = "graph"  # captured after two calls
    FIRST_GRAPH = "first_graph"  # captured at the first call, which may be refused, and then after a call
    POOL = "pool"  # in a private memory pool, and after it
    EMPTIED = "emptied_cache"  # before and after torch.cuda.empty_cache()
    THREADS = "threads"
    OFFLOADED = "offloaded"  # hooks keep saved tensors on the CPU
    REORDERED = "reordered"  # hooks bring saved tensors back with another order in memory
    CHECKPOINT = "checkpoint"  # with such hooks
    COMPILED = "compile"
    FULL_GRAPH = "compile_fullgraph"
    OVERHEAD = "compile_reduce-overhead"
    AUTOTUNED = "compile_max-autotune"
    DTENSOR = "dtensor"  # of one rank
    FAKE = "fake"  # tensors without memory, and then the call


COMPILED = (Mode.COMPILED, Mode.FULL_GRAPH, Mode.OVERHEAD, Mode.AUTOTUNED)
TRACED = (*COMPILED, Mode.DTENSOR, Mode.FAKE)
"""Circumstances that PyTorch's tools make, which take their time."""

HOOKED = (Mode.OFFLOADED, Mode.REORDERED, Mode.CHECKPOINT)
"""Circumstances of calls with gradients alone."""

CAPTURED = (Mode.GRAPH, Mode.FIRST_GRAPH)


class Values(StrEnum):
    """What stands in query, key and value."""

    NORMAL = "normal"
    LARGE = "large"  # 1e4 times a normal number
    TINY = "tiny"  # 1e-4 times a normal number
    CONSTANT = "constant"
    ZEROS = "zeros"
    SPIKES = "spikes"  # a few elements of 1e4 among normal ones
    INF = "inf"  # a few elements of +-inf
    NAN = "nan"  # one element that is no number


class Alignment(StrEnum):
    """How the rows of the tensors lie in memory, which decides what Triton compiles."""

    NATURAL = "natural"  # dense
    PADDED = "padded"  # rows of a multiple of 16 elements, beginning at one
    ODD = "odd"  # rows of an odd number of elements, beginning at an odd one
    MIXED = "mixed"  # every tensor its own
