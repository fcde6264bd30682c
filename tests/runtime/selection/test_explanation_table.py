"""What a notebook shows of an explanation."""

from xml.etree import ElementTree

import pytest

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rejection, Rung

pytestmark = pytest.mark.triton_free

SHAPE = AttentionShape(batch=1, num_heads=8, seqlen_q=1024, head_dim=64)
CONFIG = KernelConfig.of("flash_fwd", {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2, "schedule": 0})


def cells(explanation: Explanation) -> list[tuple[str, ...]]:
    """The tag and the texts of each row, under the caption."""
    caption, *rows = ElementTree.fromstring(explanation._repr_html_())
    return [(str(caption.text),), *((row[0].tag, str(row[0].text), str(row[1].text)) for row in rows)]


def test_it_shows_what_serves_and_what_was_passed_over() -> None:
    explanation = Explanation(
        rung=Rung.DEFAULT,
        reason="not tuned",
        shape=SHAPE,
        config=CONFIG,
        passed_over=(Rejection(Rung.EXACT, "nothing was measured"),),
        warnings=("a file is missing", "another is damaged"),
    )
    assert cells(explanation) == [
        (SHAPE.label,),
        ("th", "default", f"{CONFIG.label}: not tuned"),
        ("td", "exact", "nothing was measured"),
        ("td", "warning", "a file is missing; another is damaged"),
    ]


def test_a_call_of_pytorch_has_one_row_whose_signs_are_text() -> None:
    explanation = Explanation(rung=Rung.SDPA, reason="1 < 2 & <b>no kernel</b>")
    assert cells(explanation) == [("this call",), ("th", "sdpa", "PyTorch: 1 < 2 & <b>no kernel</b>")]
