"""What Nsight Compute prints as CSV, read back."""

from collections.abc import Callable

import pytest

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.profile.counters import TIME, Counters
from tests.support.models.counters import details_page, raw_page

pytestmark = pytest.mark.triton_free

DRAM, OCCUPANCY = "dram__bytes_read.sum", "sm__warps_active.avg.pct_of_peak_sustained_active"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
FIRST = (
    "flash_fwd_kernel",
    {
        TIME: ("us", "1,000.50"),
        DRAM: ("Mbyte", "100.7"),
        OCCUPANCY: ("%", "25"),
        STALL.format("wait"): ("inst", "1.5"),
        STALL.format("gmma"): ("inst", "0.5"),
    },
)
SECOND = (
    "merge(float*, int)",
    {
        TIME: ("us", "0.50"),
        DRAM: ("Mbyte", "1"),
        OCCUPANCY: ("%", "100"),
        STALL.format("wait"): ("inst", "0.5"),
        STALL.format("gmma"): ("inst", "n/a"),
    },
)
LAYOUTS = pytest.mark.parametrize("page", [raw_page, details_page])
Page = Callable[..., str]


@LAYOUTS
def test_times_are_microseconds_and_sizes_bytes(page: Page) -> None:
    (launch,) = Counters.parse(page([FIRST])).launches
    assert launch.kernel == "flash_fwd_kernel"
    assert (launch.metrics[TIME], launch.metrics[DRAM]) == (1000.5, pytest.approx(100.7e6))


@LAYOUTS
def test_launches_add_up_and_shares_are_weighed_by_time(page: Page) -> None:
    counters = Counters.parse(page([FIRST, SECOND]))
    assert [launch.kernel for launch in counters.launches] == ["flash_fwd_kernel", "merge(float*, int)"]
    assert counters.total(TIME) == 1001.0
    assert counters.total(DRAM) == pytest.approx(101.7e6)
    assert counters.share(OCCUPANCY) == pytest.approx((25 * 1000.5 + 100 * 0.5) / 1001)
    assert counters.busy_us(OCCUPANCY) == pytest.approx(0.25 * 1000.5 + 0.5)


@LAYOUTS
def test_what_a_launch_lacks_is_not_known_of_all(page: Page) -> None:
    counters = Counters.parse(page([FIRST, SECOND]))
    assert list(counters.stalls()) == ["wait"]
    assert list(Counters.parse(page([FIRST])).stalls().items()) == [("wait", 1.5), ("gmma", 0.5)]
    missing = "lts__t_bytes.sum"
    assert (counters.total(missing), counters.share(missing), counters.busy_us(missing)) == (None, None, None)


@pytest.mark.parametrize(
    ("unit", "factor"), [("ns", 1e-3), ("nsecond", 1e-3), ("usecond", 1), ("ms", 1e3), ("second", 1e6)]
)
def test_units_of_all_versions_are_known(unit: str, factor: float) -> None:
    text = raw_page([("k", {TIME: (unit, "2")})])
    assert Counters.parse(text).total(TIME) == pytest.approx(2 * factor)


@LAYOUTS
def test_a_csv_without_what_the_program_printed_is_read_too(page: Page) -> None:
    assert Counters.parse(page([FIRST], head="")) == Counters.parse(page([FIRST]))


@LAYOUTS
@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "", "\x1b[31m"])
def test_what_is_no_finite_number_is_not_known(page: Page, value: str) -> None:
    (launch,) = Counters.parse(page([("k", {TIME: ("us", "1"), DRAM: ("byte", value)})])).launches
    assert launch.metrics == {TIME: 1.0}


def test_lines_that_are_too_short_or_too_long_are_read_as_far_as_they_go() -> None:
    text = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n"0","k"\n'
    (launch,) = Counters.parse(text + f'"0","k","{TIME}","us","2","more","and more"\n').launches
    assert (launch.kernel, launch.metrics) == ("k", {TIME: 2.0})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no counters",
        '"ID","Colour"\n"0","red"\n',
        '"ID","Kernel Name","' + "x" * 200_000 + '"\n"0","k","1"\n',
        raw_page([("k", {TIME: ("ns", "n/a")})]),
    ],
)
def test_what_holds_no_counters_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no CSV of Nsight Compute"):
        Counters.parse(text)
