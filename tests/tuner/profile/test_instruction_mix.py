"""The instruction mix of compiled configs, and of listings that are written here."""

from typing import Any

import pytest

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.profile.instruction_mix import KINDS, ORDER, InstructionMix, instruction_mix
from blocktune.tuner.profile.machine_code import loops_of, parse_listing, product_loop

HOPPER = limits_for((9, 0))
SHAPE = complete_shape(4096, 64)

LISTING = """
kernel:
.text.kernel:
\t//## File "/home/me/site-packages/blocktune/kernels/a.py", line 7
        /*0000*/                   MOV R1, R2 ;
.L_x_0:
        /*0010*/                   LDL R4, [R1+0x8] ;
\t//## File "/home/me/site-packages/blocktune/kernels/a.py", line 9
        /*0020*/                   LDL R5, [R1+0xc] ;
        /*0030*/                   LDL R6, [R1+0x10] ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   STL [R1+0x8], R4 ;
        /*0080*/               @P1 BRA `(.L_x_0) ;
        /*0090*/                   LDS R3, [R7] ;
        /*00a0*/                   EXIT ;
.L_x_2:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3 ;
        /*00c0*/              @!P0 BRA `(.L_x_2) ;
        /*00d0*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*00e0*/                   BRA `(.L_x_3) ;
"""
"""A loop whose wait stands after the end of the kernel, as ptxas puts it."""


def test_a_wait_that_is_written_far_away_belongs_to_its_loop() -> None:
    code = parse_listing(LISTING)
    loops = sorted([one.address for one in loop] for loop in loops_of(code))
    assert loops == [[*range(0x10, 0x90, 0x10), 0xB0, 0xC0, 0xD0], [0xB0, 0xC0]]
    assert [one.address for one in product_loop(code)] == loops[0]


def test_reloads_are_counted_by_line() -> None:
    mix = InstructionMix.of(parse_listing(LISTING))
    assert mix.reloads == (("blocktune/kernels/a.py:9", 2), ("blocktune/kernels/a.py:7", 1))
    assert mix.stores == (("blocktune/kernels/a.py:9", 1),)
    assert {kind: count for kind, count in mix.loop.items() if count} == {
        "tensor": 1,
        "special function": 1,
        "spilled registers": 4,
        "control": 5,
    }
    assert mix.total["shared memory"] == 1
    assert sum(mix.total.values()) == 15
    assert mix.to_json()["reloads"][0] == {"line": "blocktune/kernels/a.py:9", "count": 2}


def test_a_branch_with_a_table_leads_to_all_of_its_places() -> None:
    code = parse_listing(
        """
        /*0000*/                   BRX R4 -0x10 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
.L_x_1:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   EXIT ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/               @P0 BRA `(.L_x_2) ;
        /*0070*/                   EXIT ;
"""
    )
    assert len(list(loops_of(code))) == 2
    assert [one.address for one in product_loop(code)] == [0x40, 0x50, 0x60]


def test_code_without_loops_counts_as_a_whole_and_lines_may_be_unknown() -> None:
    code = parse_listing(
        "        /*0000*/                   LDL R4, [R1] ;\n        /*0010*/                   EXIT ;\n"
    )
    assert product_loop(code) == code
    mix = InstructionMix.of(code)
    assert (mix.loop, mix.reloads) == ({}, (("unknown line", 1),))
    assert mix.total["spilled registers"] == 1


def test_no_instruction_has_two_kinds() -> None:
    names = [name for own in KINDS.values() for name in own]
    assert len(names) == len(set(names))
    assert set(ORDER) > set(KINDS)


def mix_of(name: str, **choices: int) -> InstructionMix:
    kernel: Any = get_kernel(name)
    config = KernelConfig.of(name, kernel.default_config(SHAPE, HOPPER).parameters | choices)
    return instruction_mix(kernel, config, SHAPE, HOPPER)


@pytest.mark.compiles_kernels
def test_the_loop_of_a_tile_has_the_products_and_exponentials_of_its_size() -> None:
    mix = mix_of("flash_fwd", block_m=128, block_n=64, num_warps=4, num_stages=2)
    scores, rows = 128 * 64 // (4 * 32), 128 // (4 * 16) * 2  # of one lane
    assert mix.loop["special function"] == scores + rows  # one rescaling for every row
    products = 128 // 64 * (64 // 16 + 64 // 16)  # wgmma has 64 rows and 16 of what is summed up
    assert mix.loop["tensor"] == products
    assert mix.loop["spilled registers"] == 0
    assert mix.reloads == mix.stores == ()


@pytest.mark.compiles_kernels
def test_a_tile_that_is_too_large_reloads_at_known_lines() -> None:
    mix = mix_of("flash_fwd", block_m=256, block_n=64, num_warps=4, num_stages=2)
    assert (
        sum(count for _, count in mix.reloads) + sum(count for _, count in mix.stores)
        == (mix.loop["spilled registers"])
    )
    assert mix.loop["spilled registers"] > 100
    line, _ = mix.reloads[0]
    assert line.startswith(("blocktune/kernels/portable/", "triton/"))
    assert int(line.rpartition(":")[2]) > 0
