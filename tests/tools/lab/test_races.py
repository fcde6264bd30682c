"""The study of race rules: what it draws, counts and concludes."""

from collections.abc import Sequence

import pytest

from blocktune.kernels.values.config import KernelConfig
from tools.lab.races import LISTS, RULES, DrawnRounds, Record, Tally

pytestmark = pytest.mark.triton_free

CONFIGS = [KernelConfig("flash_fwd", 16 * number, 64, 4, 2) for number in range(1, LISTS[0] + 1)]
RECORD = Record({config: [100.0 - index, 100.1 - index] for index, config in enumerate(CONFIGS)}, CONFIGS[0])


@pytest.mark.parametrize("name", RULES)
def test_every_rule_finds_a_config_that_is_clearly_the_fastest(name: str) -> None:
    counted = Tally()
    counted.hold(RULES[name], RECORD, LISTS[0], "seed")
    assert counted.regrets == [0.0, 0.0]
    assert counted.cells()[3] == "100.0 %"


def test_a_rule_that_keeps_the_first_has_its_regret() -> None:
    def first(entered: Sequence[KernelConfig], rounds: DrawnRounds) -> KernelConfig:
        rounds(entered[:2], 5)
        return entered[0]

    counted = Tally()
    counted.hold(first, RECORD, LISTS[0], "seed")
    assert counted.regrets == pytest.approx([7 / 93.05] * 2, rel=1e-3)
    assert counted.launches == 20
