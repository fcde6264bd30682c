"""What importing the package costs and loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"optuna", "sqlalchemy", "alembic", "typer", "rich"}


def loaded_after(statement: str) -> set[str]:
    """The top-level modules in a fresh interpreter after this statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_import_blocktune_loads_nothing_heavy() -> None:
    assert not loaded_after("import blocktune; blocktune.__version__") & (
        HEAVY | {"torch", "triton", "numpy", "pynvml"}
    )


@pytest.mark.parametrize("name", ["AttentionShape", "KernelConfig"])
def test_values_need_no_torch(name: str) -> None:
    assert not loaded_after(f"from blocktune import {name}") & (HEAVY | {"torch", "triton", "pynvml"})


def test_pynvml_is_loaded_when_nvml_is_read() -> None:
    """Its module stands for the dispatcher's, which loads torch, which loads pynvml."""
    assert "pynvml" not in loaded_after("import blocktune.kernels.hardware.nvml")
    assert "pynvml" in loaded_after("from blocktune.kernels.hardware.nvml import driver_version; driver_version()")


def test_the_kernels_load_torch_when_they_are_launched() -> None:
    """It takes longer to load than most commands take."""
    assert "torch" not in loaded_after("import blocktune.kernels.registry, blocktune.db.rivals, blocktune.db.store")


def test_an_autotuned_kernel_needs_no_kernel_of_attention() -> None:
    """A process whose winners are stored imports what looks them up, and nothing that computes attention."""
    code = "import blocktune, sys; blocktune.install(); print([name for name in sys.modules if 'blocktune' in name])"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "blocktune.runtime.autotuned.fallback" in loaded
    assert "blocktune.kernels.portable" not in loaded
    assert "blocktune.kernels.hopper" not in loaded


def test_a_process_of_ray_s_loads_no_store_before_its_worker() -> None:
    assert not loaded_after("import blocktune.tuner.cluster.worker") & (HEAVY | {"torch", "triton"})


def test_optuna_is_loaded_when_a_search_begins() -> None:
    assert "optuna" not in loaded_after("from blocktune import autotune, tune; import blocktune.cli.tune.run")


def test_attention_and_its_configs_need_torch_and_triton_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", str(tmp_path / "none.db"))
    call = "import torch; from blocktune import attention; attention(*[torch.zeros(1, 1, 16, 16)] * 3)\n"
    read = (
        "from blocktune import AttentionShape, best_config;"
        "print(best_config(AttentionShape(batch=2, num_heads=32, num_heads_kv=32, seqlen_q=8192, seqlen_k=8192,"
        " head_dim=64, head_dim_v=64), 'h200'))"
    )
    loaded = loaded_after(call + read)
    assert {"torch", "triton"} <= loaded
    assert not loaded & HEAVY
