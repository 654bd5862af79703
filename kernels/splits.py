"""Into how many splits attention over a cache is cut, and a model of what a choice costs.

A split is what one block of threads reads. Too few leave processors idle, too many cost a larger join. The number
depends on what the host knows (slots of the cache, heads, sequences), never on lengths that live on the device, so that
a captured graph stays valid as the text grows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TIERS = ((1024, 8), (4096, 16))  # slots up to which so many splits serve
MOST, MOST_FOR_FEW_HEADS = 32, 64
MAX_SCRATCH = 64 << 20  # bytes of partial results
TILE = 64  # slots


def num_splits(slots: int, kv_heads: int, batch: int = 1, bytes_per_split: int = 0) -> int:
    """Splits for a cache of ``slots``: fewer for many sequences, which fill the machine by themselves.

    ``bytes_per_split`` are the partial results of all rows of one split; all together stay below 64 MiB.
    """
    few_heads = slots > 32768 and kv_heads <= 4
    chosen = next((n for longest, n in TIERS if slots <= longest), MOST_FOR_FEW_HEADS if few_heads else MOST)
    chosen = max(1, chosen // batch)
    return max(1, min(chosen, MAX_SCRATCH // max(1, bytes_per_split)))


def fixed_split_slots(slots: int) -> int:
    """Exact mode: slots of every split, whatever the length of the text, in a cache of ``slots``."""
    return 256 if slots <= 32768 else 1024


@dataclass(frozen=True)
class Machine:
    """What the model knows of a GPU."""

    name: str
    num_processors: int
    blocks_per_processor: int
    bandwidth: float  # bytes a second, of all
    block_bandwidth: float  # of one block alone: its loads in flight over the memory's latency
    launch: float  # seconds of two launches
    tile_latency: float  # seconds until a block's first tile has come


# bandwidth and launch are targets of this project; what one block can draw is assumed, not measured
H200 = Machine("H200", 132, 2, 0.9 * 4.3e12, 60e9, 5.5e-6, 1e-6)


@dataclass(frozen=True)
class Estimate:
    """What one attention call would take."""

    splits: int
    blocks: int
    waves: int
    seconds: float
    fraction: float  # of the time that reading the keys and values at full bandwidth would take


def estimate(
    splits: int, slots: int, kv_heads: int, batch: int, machine: Machine = H200, tile_bytes: int = TILE * 128 * 2 * 2
) -> Estimate:
    """Model one call over ``slots`` filled slots: blocks in waves, each wave as long as its blocks' tiles take."""
    tiles = math.ceil(slots / TILE)
    share = math.ceil(tiles / splits)
    blocks = math.ceil(tiles / share) * kv_heads * batch  # the others have nothing to do
    room = machine.num_processors * machine.blocks_per_processor
    waves, left, seconds = math.ceil(blocks / room), blocks, machine.launch
    while left > 0:
        rate = min(machine.block_bandwidth, machine.bandwidth / min(left, room))
        seconds += machine.tile_latency + share * tile_bytes / rate
        left -= room
    floor = tiles * tile_bytes * kv_heads * batch / machine.bandwidth
    return Estimate(splits, blocks, waves, seconds, floor / seconds)


def simulate(
    batches: Sequence[int], heads: Sequence[int], contexts: Sequence[int], machine: Machine = H200
) -> list[dict[str, float]]:
    """The chosen number of splits beside the best of the powers of two, for every combination."""
    found = []
    for batch in batches:
        for kv_heads in heads:
            for slots in contexts:
                chosen = estimate(num_splits(slots, kv_heads, batch), slots, kv_heads, batch, machine)
                best = min(
                    (estimate(1 << i, slots, kv_heads, batch, machine) for i in range(9)), key=lambda e: e.seconds
                )
                found.append({
                    "batch": batch, "kv_heads": kv_heads, "slots": slots, "splits": chosen.splits,
                    "blocks": chosen.blocks, "waves": chosen.waves, "us": round(1e6 * chosen.seconds, 2),
                    "fraction": round(chosen.fraction, 3), "best_splits": best.splits,
                    "best_us": round(1e6 * best.seconds, 2),
                })  # fmt: skip
    return found
