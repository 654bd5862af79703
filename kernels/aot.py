"""What the Triton kernels compile to, for GPUs that are not there: registers, spills, blocks, instructions, and a gate.

Ahead-of-time compilation needs no GPU. Every case is one way to launch the attention kernel; `measure` compiles it as
the launcher would and reads the machine code, `gate` says in plain language what is not as planned.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import attention_triton as attention

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
SHARED_BUDGET = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}  # bytes a block
MATRIX = {"sm_80": r"\bHMMA", "sm_90": r"\bHGMMA", "sm_100": r"\bUTC\w*MMA", "gfx942": r"\bv_mfma"}
WIDE_LOAD = r"\bLDG\S*\.128|\bLDGSTS\S*\.128|\b(?:global|buffer)_load_(?:lds_)?dwordx4"
STRIDES = ("_b", "_h", "_r", "_s")
NARROW_LOAD = r"\bLDG\S*\.[US](?:8|16)\b|\b(?:global|buffer)_load_(?:ubyte|sbyte|ushort|sshort|short|u8|u16)"
SUM_LAYOUT = r"\}\) : \((tensor<\d+x\d+xf32, [^)]*)\) -> tensor"


@dataclass(frozen=True)
class Case:
    """One way to launch the attention kernel."""

    arch: str
    head_dim: int
    group: int
    rows: int
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    window: int = 0
    has_cap: bool = False
    has_pads: bool = False
    is_exact: bool = False
    is_join: bool = False  # the second kernel


def cases(is_quick: bool = False) -> list[Case]:
    """The whole table, or what a test run has time for."""
    if is_quick:
        shapes = [(128, 3, 1), (128, 4, 16), (256, 4, 16)]
        found = [Case(arch, *shape, is_exact=shape == (128, 4, 16)) for arch in TARGETS for shape in shapes]
        return [*found, Case("sm_90", 128, 4, 5, is_join=True)]
    found = []
    for arch in TARGETS:
        for head_dim in (64, 80, 96, 128, 256):
            found += [Case(arch, head_dim, group, rows) for group, rows in ((3, 1), (8, 4), (4, 16), (8, 64))]
        chain = (arch, 128, 4, 5)
        found += [Case(*chain, window=4096), Case(*chain, has_cap=True), Case(*chain, has_pads=True)]
        found += [Case(arch, 128, 4, rows, is_exact=True) for rows in (4, 16)]
        found += [Case(*chain, dtype="fp16", kv_dtype="fp16")]
        found += [Case(*chain, dtype="fp32", kv_dtype="fp32")]
        found += [Case(arch, head_dim, 4, 5, is_join=True) for head_dim in (64, 128, 256)]
        if arch != "sm_80":  # has no such type
            found += [Case(arch, 128, 4, rows, kv_dtype="fp8e4nv") for rows in (1, 5, 16)]
    return found


@dataclass(frozen=True)
class Measured:
    """What a case compiled to; ``blocks`` fit on a processor at once."""

    case: Case
    block_m: int
    config: attention.Config
    registers: int
    shared: int  # bytes
    spills: int  # instructions
    blocks: int
    matrix: int  # the architecture's own matrix instructions
    wide_loads: int  # of 128 bits
    narrow_loads: int  # of 8 or 16 bits
    layouts: int  # in which rows are summed; one, where both loops are to round alike

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compile_case(case: Case) -> tuple[int, attention.Config, Any]:
    """Packed rows of a block, the configuration and the compiled kernel of ``case``."""
    if attention.IS_INTERPRETED:
        raise ValueError("kernels cannot be compiled while TRITON_INTERPRET is set")
    block_m, config, kernel, fixed = _launch(case)
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("factor", "inner", "out_scale"), "fp32")
    types |= dict.fromkeys(("lengths", "pads", "words", "positions"), "*i64")
    types |= dict.fromkeys(("partial", "sums", "sinks"), "*fp32") | dict.fromkeys(("q", "out"), f"*{case.dtype}")
    types |= dict.fromkeys(("keys", "values"), f"*{case.kv_dtype}") | dict.fromkeys(fixed, "constexpr")
    is_aligned = [types[name].startswith("*") or name[1:] in STRIDES for name in kernel.arg_names]
    made = triton.compile(
        ASTSource(
            kernel, {name: types[name] for name in kernel.arg_names}, constexprs=fixed,
            attrs={(i,): [["tt.divisibility", 16]] for i, aligned in enumerate(is_aligned) if aligned},
        ),
        target=TARGETS[case.arch],
        options={
            "num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": not case.is_exact,
        },
    )  # fmt: skip
    return block_m, config, made


def _launch(case: Case) -> tuple[int, attention.Config, Any, dict[str, Any]]:
    """What the launcher would choose: packed rows of a block, configuration, kernel, constants."""
    lines, kv_bytes = case.group * case.rows, {"fp32": 4, "fp8e4nv": 1}.get(case.kv_dtype, 2)
    block_m, config = attention.config_for(case.arch, case.head_dim, lines, kv_bytes)
    fixed = attention.constants(
        case.head_dim, case.group, block_m, config.block_n, case.is_exact, 4096, case.window, case.has_pads,
        case.has_cap,
    )  # fmt: skip
    if not case.is_join:
        return block_m, config, attention._split_kernel, fixed | {"UPCAST": False}
    shape = {name: fixed[name] for name in ("GROUP", "HEAD_DIM", "BLOCK_D")}
    chunk = {"CHUNK": attention.JOIN.block_n, "HAS_SINKS": True}
    return 1, attention.JOIN, attention._join_kernel, shape | chunk


def measure(case: Case) -> Measured:
    """Compile ``case`` and read what came out."""
    block_m, config, made = compile_case(case)
    is_amd = case.arch.startswith("gfx")
    code = made.asm["amdgcn"] if is_amd else _sass(made.asm["cubin"])
    if is_amd:
        registers = int(_last(r"\.vgpr_count:\s+(\d+)", code))
        spills = int(_last(r"\.vgpr_spill_count:\s+(\d+)", code))
    else:
        registers = int(_last(r"REG:(\d+)", code))
        spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
    shared = int(made.metadata.shared)
    blocks = _amd_blocks(registers, shared, config.num_warps) if is_amd else _nvidia_blocks(
        registers, shared, config.num_warps, case.arch, getattr(made.metadata, "tmem_size", None) or 0
    )  # fmt: skip
    matrix, wide, narrow = (len(re.findall(pattern, code)) for pattern in (MATRIX[case.arch], WIDE_LOAD, NARROW_LOAD))
    layouts = len(set(re.findall(SUM_LAYOUT, made.asm["ttgir"])))
    return Measured(case, block_m, config, registers, shared, spills, blocks, matrix, wide, narrow, layouts)


def _last(pattern: str, text: str) -> str:
    return re.findall(pattern, text)[-1]


def _sass(cubin: bytes) -> str:
    """Resources and machine code, by the tool that comes with triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        runs = [
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
            for option in ("-res-usage", "-sass")
        ]
    return "".join(run.stdout + run.stderr for run in runs)


def _nvidia_blocks(registers: int, shared: int, num_warps: int, arch: str, tensor_columns: int) -> int:
    """Blocks on a processor with 65,536 registers, handed out by 256 a warp, 64 warps, and 1 KB of memory a block."""
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * num_warps)
    by_memory = (SHARED_BUDGET[arch] + 1024) // (shared + 1024)
    by_columns = 512 // tensor_columns if tensor_columns else 32
    return min(by_registers, by_memory, by_columns, 64 // num_warps, 32)


def _amd_blocks(registers: int, shared: int, num_warps: int) -> int:
    """Blocks on a compute unit: four SIMDs of 512 registers a lane, handed out by 8, at most 8 waves each."""
    waves = 4 * min(8, 512 // (-(-registers // 8) * 8))
    return min(waves // num_warps, SHARED_BUDGET["gfx942"] // max(shared, 1))


def gate(found: Iterable[Measured]) -> list[str]:
    """What is not as planned, a sentence each."""
    failures = []
    for m in found:
        budget = SHARED_BUDGET[m.case.arch]
        has_matrix = m.case.dtype != "fp32" and m.block_m >= 64
        broken = {
            f"{m.spills} spills to memory": m.spills > 0,
            f"{m.shared} bytes of shared memory, {budget} are there": m.shared > budget,
            f"{m.blocks} blocks on a processor, {m.config.blocks} planned": m.blocks < m.config.blocks,
            "no load of 128 bits": m.wide_loads == 0,
            f"{m.narrow_loads} loads of 16 bits or less": m.narrow_loads > 0,
            "none of the architecture's matrix instructions": has_matrix and m.matrix == 0,
            "masked tiles are summed in another order": m.case.is_exact and m.layouts != 1,
        }
        failures += [f"{m.case}: {reason}" for reason, is_broken in broken.items() if is_broken]
    return failures
