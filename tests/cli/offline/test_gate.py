"""Tables as a check: exit code, JUnit's XML, and what is said."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from blocktune.cli.offline.gate import junit_text, require_no_flaws
from blocktune.cli.offline.tables import print_mix
from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import ConfigFlawError, UsageError
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.compile.answers import Compiled
from blocktune.tuner.dry_run.config_row import Flaw, flaws_named, rows_of
from blocktune.tuner.dry_run.config_table import OfflineTable
from blocktune.tuner.profile.instruction_mix import ORDER, InstructionMix
from blocktune.tuner.profile.machine_code import parse_listing

H200 = device_named("h200")
GOOD = KernelResources(registers=32, shared_bytes=0, num_warps=4, tensor_cores="none", code_sha256="a" * 64)
SPILLING = replace(GOOD, registers=255, spill_bytes=64, code_sha256="b" * 64)
LARGE = replace(GOOD, shared_bytes=300_000, code_sha256="c" * 64)


def made_table(*resources: KernelResources | None, error: str = "too <large>") -> OfflineTable:
    """Return the table of configs that take this; None does not compile."""
    compiled = {
        LaunchConfig("lib:kernel", (("BLOCK", 1 << place),)): Compiled(
            outcome=Outcome.COMPILE_ERROR if taken is None else Outcome.OK, resources=taken, error=error
        )
        for place, taken in enumerate(resources)
    }
    rows = rows_of(compiled, H200.limits, {}, {})
    return OfflineTable(kernel="lib:kernel", label="n=1", limits=H200.limits, device=H200, rows=rows, listed=len(rows))


TABLE = made_table(GOOD, GOOD, SPILLING, LARGE, None)


def test_every_flaw_is_found_and_named() -> None:
    assert [(row.number, str(flaw)) for row, flaw, _ in TABLE.flawed()] == [
        (2, "duplicates"),
        (3, "spills"),
        (4, "unfit"),
        (5, "unfit"),
    ]
    assert [row.number for row in TABLE.ranked] == [1, 2, 3, 4, 5]


def test_a_check_fails_on_the_flaws_that_it_names() -> None:
    with pytest.raises(ConfigFlawError, match=r"allows no such config, but 1 config is: lib:kernel BLOCK=4 on NVIDIA"):
        require_no_flaws([TABLE], [Flaw.SPILLS])
    with pytest.raises(ConfigFlawError, match=r"but 8 configs are: .*; and 3 more. Take them out"):
        require_no_flaws([TABLE, TABLE], list(Flaw))
    require_no_flaws([made_table(GOOD)], list(Flaw))
    assert ConfigFlawError.exit_code == 8


def test_a_suite_has_a_case_for_each_config() -> None:
    (suite,) = ElementTree.fromstring(junit_text([TABLE], [Flaw.UNFIT, Flaw.SPILLS]))
    assert (suite.get("tests"), suite.get("failures")) == ("5", "3")
    failures = [case.find("failure") for case in suite]
    assert [None if each is None else each.get("type") for each in failures] == [None, None, "spills", "unfit", "unfit"]
    assert failures[4] is not None
    assert "too <large>" in str(failures[4].get("message"))


def test_characters_that_xml_does_not_have_are_left_out() -> None:
    table = made_table(None, error="\x1b[31merror\x00: no\ud800 ü \U0001f600\ufffe here")
    (suite,) = ElementTree.fromstring(junit_text([table], [Flaw.UNFIT]).encode())
    assert "[31merror: no ü \U0001f600 here" in str(suite[0][0].get("message"))


def test_flaws_are_named_by_their_words() -> None:
    assert flaws_named("spills, unfit") == (Flaw.SPILLS, Flaw.UNFIT)
    for wrong in ("spill", "", ","):
        with pytest.raises(UsageError, match="Flaws are spills, unfit, duplicates"):
            flaws_named(wrong)


def test_code_without_a_loop_has_a_table_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_mix(InstructionMix.of(parse_listing("        /*0000*/                   EXIT ;\n")))
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "instructions of a warp"
    assert "loop" not in head
    assert len(rows) == len(ORDER)
