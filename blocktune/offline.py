"""Triton kernels compiled for GPUs that need not be here: what each config takes, before one is launched.

    from blocktune import offline

    print(offline.explain(step, device="h200"))  # every config of every kernel that step() launches
    print(offline.table(kernel, "*bf16, *bf16, i32=4096", device="a100"))  # of one autotuned kernel, for these types
    code = offline.compile(kernel, "*bf16, *bf16, i32=4096", {"BLOCK": 512, "num_warps": 4}, device="h200")
    print(code.resources.registers, code.occupancy.blocks_per_sm)

Nothing is launched and nothing is timed: ranks are by resources.
"""

from blocktune.tuner.dry_run.config_row import Flaw, OfflineConfig
from blocktune.tuner.dry_run.config_table import OfflineTable
from blocktune.tuner.dry_run.explain import OfflineReport, explain, table
from blocktune.tuner.offline.code import OfflineCode
from blocktune.tuner.offline.compile import compile_offline as compile

__all__ = ["Flaw", "OfflineCode", "OfflineConfig", "OfflineReport", "OfflineTable", "compile", "explain", "table"]
