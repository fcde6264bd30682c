"""The table of shapes drawn next to other implementations."""

from pathlib import Path
from typing import Any

from tools.bench.drawn_peers.draw import GROUPS
from tools.bench.drawn_peers.record import Record
from tools.pages.pages import with_results
from tools.pages.searches.drawn_peer_tables import NOTHING

NAME = "h200.drawn-peers.table.json"
PLAIN, DECODING = list(GROUPS)[1], list(GROUPS)[-1]


def page(folder: Path) -> str:
    return with_results(f"<!-- results {NAME} -->\n<!-- /results -->", folder)


def row(group: str, label: str, **ratios: float) -> dict[str, Any]:
    fastest = min(ratios, key=lambda name: ratios[name])
    return {"group": group, "label": label, "ratios": ratios, "fastest": fastest, "ratio": ratios[fastest]}


def test_groups_have_a_row_each_and_what_is_clearly_slower_is_named(tmp_path: Path) -> None:
    record = Record(tmp_path / NAME, seed=7, drawn=5, peers=["fa2", "cudnn", "fa4"], missing={})
    record.add(row(DECODING, "b1 h8 s1/4096 d64 bf16", fa2=1.21))
    record.add(row(PLAIN, "b1 h8 s777 d64 bf16", cudnn=0.9, fa4=1.1))
    record.add(row(PLAIN, "b1 h8 s4096 d64 bf16", cudnn=0.99, fa4=1.1))
    record.add({"group": PLAIN, "label": "b9 h8 s1024 d64 bf16", "error": "out of memory"})
    shown = page(tmp_path)
    assert "Measured without FlashAttention-3. CPU" in shown
    assert "4 shapes drawn with seed 7" in shown
    assert f"| {PLAIN} | 2 | 0.944 | 0.900 | 2 | 1 |\n| {DECODING} | 1 | 1.210 | 1.210 | 0 | 0 |\n| all | 3 |" in shown
    assert "Below 0.97: b1 h8 s777 d64 bf16 0.90 (cuDNN). 1 more could not be timed." in shown


def test_without_a_file_the_page_says_how_it_comes_about(tmp_path: Path) -> None:
    assert NOTHING in page(tmp_path)
