"""The tool that compares our attention under transformers and diffusers, on small models and the CPU."""

from importlib.util import find_spec

import pytest
import torch

from tests.support.models.families import need_transformers
from tools.end_to_end.rows import Lab
from tools.hugging_face.batches import FAMILIES, Workload, batch_row
from tools.hugging_face.blocks import BACKENDS, Sizes, block_rows, import_diffusers

pytestmark = [pytest.mark.triton_free, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CPU = torch.device("cpu")
SMALL = Workload(hidden_size=64, layers=2, head_dim=16, prompts=3, longest=40, new_tokens=4)
BLOCKS = {
    "Flux, double block": Sizes(2, 16, 12, 4),
    "Wan block": Sizes(3, 16, 12, 4, 64),
    "attention, text mask": Sizes(2, 16, 12, 4),
}


@need_transformers
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_a_batch_are_compared(family: str) -> None:
    row = batch_row(family, SMALL, CPU, torch.float32, is_timed=family == "llama")
    assert (row.same + row.tied, row.wrong) == (3, 0)
    assert list(row.tokens_per_second) == (["blocktune", "sdpa"] if family == "llama" else [])


@pytest.mark.skipif(find_spec("diffusers") is None, reason="the diffusers integration needs diffusers")
def test_blocks_are_timed_with_every_backend() -> None:
    import_diffusers()
    for row in block_rows(Lab(CPU, torch.float32, rounds=2, steps=1), BLOCKS):
        assert set(row.timed.step_us) | set(row.refused) == set(BACKENDS)
        assert next(iter(row.timed.step_us)) == "blocktune"
        assert row.timed.ratios["native"].median > 0
