"""Every kernel compiles for the GPUs it is meant for, on a machine without one, and keeps its values in registers."""

from dataclasses import replace

import pytest

from tests.kernel_tools import GFX942, SM_80, Job, compiled, kernels

norm, sample, rope, loss, compact, verify = map(
    kernels, ("add_rms_norm", "sample", "rope_append", "exit_loss", "compact", "verify")
)
BF16, F32, I64 = "*bf16", "*fp32", "*i64"


def typed(**names: str) -> dict[str, str]:
    """{name: type} of `type="name name"`, with types as (bf16, f32, i64) pointers or (wide, number) scalars."""
    kinds = {"bf16": BF16, "f32": F32, "i64": I64, "wide": "i64", "number": "fp32"}
    return {name: kinds[kind] for kind, listed in names.items() for name in listed.split()}


JOBS = {
    "sample": Job(
        sample.__name__,
        "best_of_part",
        typed(bf16="scores", i64="seeds positions columns made", number="temperature"),
        {"STREAM": 0, "IS_PROBS": False, "IS_GREEDY": False, "HAS_COLUMNS": True, "BLOCK": sample.BLOCK,
         "NUM_BLOCKS": sample.BLOCKS_PER_PART},
        sample.NUM_WARPS,
        divisible=("num_columns",),
    ),
    "pick": Job(
        sample.__name__, "best_of_row", typed(i64="made columns tokens"), {"HAS_COLUMNS": False, "BLOCK": 64}, 1
    ),
    "verify": Job(
        verify.__name__,
        "walk_coupled",
        typed(i64="own tokens parents lengths path num_accepted next_token new_lengths"),
        {"ROWS": 64},
        1,
    ),
    "verify-rejection": Job(
        verify.__name__,
        "walk_rejection",
        typed(f32="target_probs draft_probs left", i64="tokens parents seeds positions lengths path num_accepted "
              "last_position new_lengths"),
        {"STREAM": 2, "HAS_PROBS": True, "ROWS": 64, "BLOCK": verify.BLOCK},
        verify.NUM_WARPS,
        divisible=("num_columns",),
    ),
    "compact": Job(
        compact.__name__,
        "move_rows",
        typed(i64="table path num_accepted first"),
        {"FIELDS": 6, "WORD": "int64", "SIZE": 8, "ROWS": 64, "COLUMNS": compact.MOST_WORDS},
        compact.NUM_WARPS,
    ),
    "rope": Job(
        rope.__name__,
        "turn_head",
        typed(bf16="qkv cos sin query_norm key_norm queries keys values", i64="positions slots",
              wide="key_sequence value_sequence", number="eps"),
        {"HAS_NORMS": False, "BLOCK": 128},
        rope.NUM_WARPS,
        options=rope.EXACT,
    ),
    "norm": Job(
        norm.__name__,
        "norm_row",
        typed(bf16="residual delta weight total normed", number="eps"),
        {"HAS_DELTA": True, "IS_OFFSET": False, "BLOCK": max(norm.WARPS)},
        norm.WARPS[max(norm.WARPS)],
        options=norm.EXACT,
        divisible=("width",),
    ),
    "loss": Job(
        loss.__name__,
        "loss_row",
        typed(bf16="logits", f32="probs weights losses"),
        {"NAME": len(loss.LOSSES) - 1, "BLOCK": loss.BLOCK},
        loss.NUM_WARPS,
        divisible=("num_columns", "logits_stride", "probs_stride"),
    ),
}  # fmt: skip
VARIANTS = {
    "sample": [{"IS_PROBS": True, "HAS_COLUMNS": False}, {"IS_GREEDY": True}],
    "verify-rejection": [{"HAS_PROBS": False}],
    "compact": [{"WORD": "int16", "SIZE": 2, "ROWS": 8}],
    "rope": [{"HAS_NORMS": True}],
    "norm": [{"IS_OFFSET": True}, {"HAS_DELTA": False}],
    "loss": [{"NAME": i} for i in range(len(loss.LOSSES) - 1)],
}
STARVED = "norm with few registers"
ELSEWHERE = {SM_80: ("compact", "loss"), GFX942: ("sample", "verify-rejection", "compact")}


@pytest.fixture(scope="module")
def usage() -> dict[str, dict[str, int]]:
    jobs = JOBS | {
        f"{name} for {target[1]}": replace(JOBS[name], target=target)
        for target, names in ELSEWHERE.items()
        for name in names
    }
    for name, variants in VARIANTS.items():
        for constants in variants:
            jobs[f"{name} {constants}"] = replace(JOBS[name], constants=JOBS[name].constants | constants)
    jobs[STARVED] = replace(JOBS["norm"], options=norm.EXACT | {"maxnreg": 24})
    return dict(zip(jobs, compiled(list(jobs.values())), strict=True))


def test_no_kernel_spills(usage: dict[str, dict[str, int]]) -> None:
    """Registers hold everything; the count of spills is not always zero, as a kernel that is denied them shows."""
    spills = {name: numbers["spills"] for name, numbers in usage.items()}
    assert spills.pop(STARVED) > 0
    assert not any(spills.values()), spills
    assert all(0 < numbers["registers"] <= 255 for numbers in usage.values())


def test_rows_are_read_by_wide_loads(usage: dict[str, dict[str, int]]) -> None:
    """16 bytes a thread, where a vocabulary or a width is a multiple of 16."""
    for name in ("sample", "verify-rejection", "norm", "loss"):
        assert usage[name]["wide_loads"] > 0, name
