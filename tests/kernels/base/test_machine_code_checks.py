"""The checks of machine code and of shared memory find what is wrong, and nothing in what is right."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.compile.compiler import options_of, ptxas_version, source_of
from tests.support.machine_code.sass import Instruction, blocks_of, disassembled, parsed
from tests.support.machine_code.sass_values import states
from tests.support.machine_code.shared_memory_checks import descriptor_problems, memory_problems
from tests.support.machine_code.shared_memory_ir import parsed as parsed_ir
from tests.support.machine_code.wgmma_descriptors import layouts, unwritten_reads, wrong_descriptors
from tests.support.triton_modes import compiled_here

HOPPER = (9, 0)
PTX = "add.s64 %rd58, %rd3, -9223371899415822272;\nor.b64 %rd4, %rd3, 4611686293305294848;\nadd.s64 %rd5, %rd3, -2;"
RIGHT = (
    "UMOV UR4, 0x400",
    "USHF.R.U32.HI UR6, URZ, 0x4, UR4",
    "USGXT.U32 UR6, UR6, 0xe",
    "UIADD3 UR8, UP0, UR6, 0x40, URZ",
    "UIADD3.X UR9, URZ, -0x7fffffe0, URZ, UP0, !UPT",
    "HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR6].tnspB, R24, gsb0",
    "EXIT",
)


def listing(lines: Sequence[str]) -> list[Instruction]:
    return parsed("\n".join(f"        /*{16 * place:04x}*/   {line} ;" for place, line in enumerate(lines)))


def with_line(place: int, *lines: str) -> list[str]:
    """The right code with other lines in the place of one."""
    return [*RIGHT[:place], *lines, *RIGHT[place + 1 :]]


def wrong(lines: Sequence[str]) -> list[str]:
    return wrong_descriptors(listing(lines), PTX)


def test_the_layouts_of_ptx_are_the_high_words_that_a_descriptor_can_have() -> None:
    assert layouts(PTX) == {0x80000020, 0x40000040}


def test_a_right_descriptor_is_right() -> None:
    assert wrong(RIGHT) == []
    assert unwritten_reads(listing(RIGHT)) == []


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (with_line(4, "UIADD3.X UR9, UR25, -0x7fffffe0, URZ, UP0, !UPT"), "registers that were not written"),
        (with_line(3, "UIADD3 UR8, UP0, UR25, 0x40, URZ"), "registers that were not written"),
        (with_line(4, "S2UR UR9, SR_CTAID.X", "UIADD3.X UR9, UR9, -0x7fffffe0, URZ, UP0, !UPT"), "layout is anything"),
        (with_line(4, "UMOV UR9, 0xc0000010"), "layout is 0xc0000010, and PTX has 0x40000040, 0x80000020"),
        (with_line(4, "UMOV UR9, 0x80000020", "S2UR UR8, SR_CTAID.X"), "address is anything in 0x0..0xffffffff"),
    ],
)
def test_a_wrong_descriptor_is_found(lines: Sequence[str], says: str) -> None:
    (line,) = wrong(lines)
    assert line.startswith("0x")
    assert says in line


def test_both_descriptors_of_a_product_are_looked_at() -> None:
    product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT"
    moves = ("UMOV UR10, UR8", "UMOV UR11, UR9")
    assert wrong(with_line(5, *moves, product)) == []
    assert len(wrong(with_line(5, moves[0], product))) == 1
    assert len(wrong(with_line(5, product.replace("UR8", "UR12")))) == 2


EXCHANGE = [f"ULOP3.LUT UR{goal}, UR9, UR5, URZ, 0x3c, !UPT" for goal in (9, 5, 9)]
DETOURS = {
    "moved": with_line(5, "MOV R7, UR9", "UMOV UR9, URZ", "R2UR UR9, R7", RIGHT[5]),
    "multiplied by nothing": with_line(5, "IMAD.U32 R7, RZ, RZ, UR9", "UMOV UR9, URZ", "R2UR UR9, R7", RIGHT[5]),
    "spilled": with_line(
        5, "MOV R7, UR9", "STL.64 [R1+0x18], R6", "UMOV UR9, URZ", "LDL R8, [R1+0x1c]", "R2UR UR9, R8", RIGHT[5]
    ),
    # the high word is -0x7fffffdf, less what the low word borrows
    "subtracted": with_line(
        4, "UMOV UR7, URZ", "UMOV UR10, 0xffffffc0", "UMOV UR11, 0x7fffffdf", "UIADD3.64 UR8, UR6, -UR10, URZ"
    ),
    "exchanged": with_line(5, "UMOV UR5, UR9", "UMOV UR9, 0x5", *EXCHANGE, RIGHT[5]),
}  # fmt: skip


@pytest.mark.parametrize("detour", DETOURS)
def test_descriptors_are_followed_through_what_assemblers_do_with_them(detour: str) -> None:
    assert wrong(DETOURS[detour]) == []


def test_what_differs_between_two_paths_is_not_known() -> None:
    branch = ("ISETP.GT.AND P0, PT, R1, RZ, PT", "@P0 BRA 0x80", "UMOV UR9, 0x40000040")
    assert "anything in 0x40000040..0x80000020" in wrong(with_line(5, *branch, RIGHT[5]))[0]
    only_one = ["ISETP.GT.AND P0, PT, R1, RZ, PT", "@P0 BRA 0x70", *RIGHT[:5], *RIGHT[5:]]
    assert "not written" in wrong(only_one)[0]


def test_a_loop_ends_and_gives_up_what_grows() -> None:
    lines = ["UMOV UR9, URZ", "UIADD3 UR9, UR9, 0x1, URZ", "ISETP.GT.AND P0, PT, R1, RZ, PT", "@P0 BRA 0x10", "EXIT"]
    assert [len(block.code) for block in blocks_of(listing(lines))] == [1, 3, 1]
    *_, (_, last) = states(listing(lines))
    assert last["UR9"] == (0, 0xFFFFFFFF)


def test_a_guarded_write_may_not_have_happened() -> None:
    assert wrong(with_line(4, RIGHT[4], "@P0 UMOV UR9, 0x40000040")) != []
    assert wrong(with_line(4, RIGHT[4], "@P0 UMOV UR9, 0x80000020")) == []


def test_reads_of_what_nothing_wrote_are_found() -> None:
    (line,) = unwritten_reads(listing(with_line(3, "UIADD3 UR8, UP0, UR25, 0x40, URZ")))
    assert line.endswith("UR25 was not written")
    assert unwritten_reads(listing(with_line(3, "@UP1 UIADD3 UR8, UP0, UR25, 0x40, URZ"))) == []


def test_a_spill_of_what_nothing_wrote_is_no_use_of_it_and_a_use_of_what_it_brings_back_is() -> None:
    spill, fill = "MOV.SPILL R9, UR25", "R2UR.FILL UR26, R9"
    assert unwritten_reads(listing(with_line(0, spill, RIGHT[0]))) == []
    filled = (spill, fill, "UIADD3 UR8, UP0, UR26, 0x40, URZ")
    (line,) = unwritten_reads(listing(with_line(3, *filled)))
    assert line.endswith("UR26 was not written")


def test_a_copy_of_what_nothing_wrote_is_right_only_where_it_is_overwritten_unread() -> None:
    copy, write = "UMOV UR26, UR25", "R2UR UR26, R9"
    assert unwritten_reads(listing(with_line(0, copy, write, RIGHT[0]))) == []
    for between in ("UIADD3 UR8, UPT, UPT, UR26, 0x40, URZ", "UTCHMMA gdesc[UR26], gdesc[UR6], tmem[UR5]", "BRA 0x10"):
        assert unwritten_reads(listing(with_line(0, copy, between, write, RIGHT[0])))


@pytest.mark.exhaustive
@compiled_here
def test_the_wrong_code_of_an_old_assembler_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Values of 32 columns next to queries of 64, at their own width: as the kernels must not be compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if not ptxas_version(HOPPER).startswith("12.8."):
        pytest.skip(f"ptxas {ptxas_version(HOPPER)} need not make this mistake")
    sizes = {"batch": 1, "num_heads": 2, "num_heads_kv": 2, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64}
    shape, kernel = AttentionShape(**sizes, head_dim_v=32, causal=Causal.UPPER_LEFT), get_kernel("flash_fwd")
    spec = kernel.compile_spec(kernel.default_config(shape, limits_for(HOPPER)), shape)
    compiled = _compiled(_with_constant(spec, "WIDTH_V", 32))
    assert len(wrong_descriptors(disassembled(compiled.asm["cubin"]), compiled.asm["ptx"])) > 0
    compiled = _compiled(_with_constant(spec, "WIDTH_V", 64))
    assert wrong_descriptors(disassembled(compiled.asm["cubin"]), compiled.asm["ptx"]) == []


def _with_constant(spec: CompileSpec, name: str, value: int) -> CompileSpec:
    place = next(key for key in spec.constexprs if _name(spec, key) == name)
    return replace(spec, constexprs={**spec.constexprs, place: value})


def _name(spec: CompileSpec, key: Any) -> str:
    return str(spec.function.arg_names[key[0]] if isinstance(key, tuple) else key)


def _compiled(spec: CompileSpec) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(source_of(spec), target=GPUTarget("cuda", 90, 32), options=options_of(spec))


IR = """
#wide = #ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}>
#bar = #ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}>
module attributes {ttg.shared = 32792 : i32} {
  tt.func public @kernel(%arg0: !tt.tensordesc<tensor<64x64xbf16, #wide>>) {
    %0 = ttg.local_alloc {allocation.offset = 0 : i32} : () -> !ttg.memdesc<3x64x64xbf16, #wide, #smem, mutable>
    %1 = ttg.local_alloc {allocation.offset = 32768 : i32} : () -> !ttg.memdesc<3x1xi64, #bar, #smem, mutable>
    %2 = ttg.local_alloc {allocation.offset = 24576 : i32} : () -> !ttg.memdesc<64x64xbf16, #wide, #smem, mutable>
    cf.br ^bb1(%c0 : i32)
  ^bb1(%3: i32):  // 2 preds: ^bb0, ^bb1
    %4 = ttg.memdesc_index %0[%3] : !ttg.memdesc<3x64x64xbf16, #wide, #smem, mutable> -> !ttg.memdesc<64x64xbf16, #wide, #smem, mutable>
    %5 = ttg.memdesc_index %1[%3] : !ttg.memdesc<3x1xi64, #bar, #smem, mutable> -> !ttg.memdesc<1xi64, #bar, #smem, mutable>
    ttng.barrier_expect %5, 8192, %true : !ttg.memdesc<1xi64, #bar, #smem, mutable>
    ttng.async_tma_copy_global_to_local %arg0[%3, %3] %4, %5, %true : !tt.tensordesc<tensor<64x64xbf16, #wide>>, !ttg.memdesc<1xi64, #bar, #smem, mutable> -> !ttg.memdesc<64x64xbf16, #wide, #smem, mutable>
    %6 = "tt.reduce"(%cst) <{axis = 1 : i32}> ({
    ^bb0(%a: f32, %b: f32):
      tt.reduce.return %a : f32
    }) {allocation.offset = 40000 : i32} : (tensor<64x64xf32>) -> tensor<64xf32>
    %7 = ttng.warp_group_dot %2, %4, %cst : !ttg.memdesc<64x64xbf16, #wide, #smem> * !ttg.memdesc<64x64xbf16, #wide, #smem, mutable> -> tensor<64x64xf32>
    cf.cond_br %true, ^bb1(%3 : i32), ^bb2
  ^bb2:  // pred: ^bb1
    %8 = ttg.local_alloc {allocation.offset = 0 : i32} : () -> !ttg.memdesc<64x64xbf16, #wide, #smem, mutable>
    ttng.async_tma_copy_local_to_global %arg0[%3, %3] %8 : !tt.tensordesc<tensor<64x64xbf16, #wide>>, !ttg.memdesc<64x64xbf16, #wide, #smem, mutable>
    tt.return
  }
}
"""  # noqa: E501


def illegal(old: str = "", new: str = "") -> list[str]:
    assert old in IR
    return memory_problems(parsed_ir(IR.replace(old, new)))


def test_legal_tiles_are_legal() -> None:
    assert illegal() == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("offset = 24576", "offset = 24832", "begins again every 1024 B"),
        ("3x64x64xbf16", "3x63x64xbf16", "plus multiples of (8064,)"),
        ("offset = 32768", "offset = 32772", "no multiple of 8 B"),
        ("offset = 32768", "offset = 24576", "overlaps 3x1 i64"),
        ("offset = 24576", "offset = 16384", "overlaps 3x64x64 bf16 at 0..24576, which is alive"),
        ("offset = 40000", "offset = 8192", "scratch memory at 8192 overlaps"),
        ("%5, 8192", "%5, 4096", "expect {4096} B, and [8192] B are copied"),
        ("ttng.barrier_expect %5, 8192", "ttng.wait_barrier %5", "expect nothing B"),
    ],
)
def test_an_illegal_tile_is_found(old: str, new: str, says: str) -> None:
    if old == "3x64x64xbf16":  # and what is taken of it
        found = memory_problems(
            parsed_ir(IR.replace(old, new).replace("<64x64xbf16, #wide, #smem, m", "<63x64xbf16, #wide, #smem, m"))
        )
    else:
        found = illegal(old, new)
    assert any(says in line for line in found), found


def test_what_is_dead_may_be_overwritten() -> None:
    """%8 takes the place of %0, which no path after it uses."""
    assert illegal("local_to_global %arg0[%3, %3] %8", "local_to_global %arg0[%3, %3] %4")[-1].startswith(
        "ttg.local_al"
    )


def test_blocks_of_descriptors_fit_their_swizzle() -> None:
    right = {"swizzle": 3, "elem_size": 2, "block_size": [1, 1, 64, 64]}
    assert descriptor_problems([right, None, right | {"swizzle": 0, "block_size": [256]}]) == []
    assert "wider than a swizzle of 64 B" in descriptor_problems([right | {"swizzle": 2}])[0]
    assert "larger than 256" in descriptor_problems([right | {"block_size": [512, 64]}])[0]
    assert "no multiple of 16 B" in descriptor_problems([right | {"block_size": [64, 4]}])[0]
