"""What a check must cost on a GPU, from bytes and launches: the floor that a measurement is held against.

    python bench/gpu_model.py                       # the table of docs/performance.md
    python bench/gpu_model.py --bandwidth 3.35 --launch-us 3

The floor of a check is what nobody can avoid: 4 bytes of block table and 8 bytes of tag for every live page, once, at
the bandwidth that a copy reaches on the same machine, plus one launch. Rows, extents and verdicts add 80 bytes a row.
A tag is read where it lies: while a pool's tags fit the L2 cache they come from there, and the floor is generous; where
they do not, each tag costs a sector of 32 bytes, which is why the model gives that figure too.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

TABLE_BYTES, TAG_BYTES, SECTOR_BYTES = 4, 8, 32
ROW_BYTES = 8 + 8 + 2 * 8 + 2 * 8 + 4 * 8
"""Table row, expected digest, two offsets, one extent, and the record that is written."""
ALLOWED_OVER_FLOOR = 1.3
ROWS = (32, 256)
TOKENS = (2048, 16384, 65536)
PAGE_SIZES = (1, 16, 64)
COPY_TB_S, LAUNCH_US = 3.0, 3.0
"""Defaults of the table: an H100's copy, and one launch of a graph or a busy stream."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What one check reads and must cost.

    pages        live pages of all rows
    floor_bytes  12 bytes a page; read_bytes: with the rows' own words
    floor_us     floor_bytes at a copy's bandwidth, plus one launch; limit_us: what is allowed
    scattered_us the same with each tag in a sector of its own, out of L2
    """

    rows: int
    tokens: int
    page_size: int
    pages: int
    floor_bytes: int
    read_bytes: int
    floor_us: float
    limit_us: float
    scattered_us: float


def floor_of(
    rows: int, tokens: int, page_size: int, *, copy_tb_s: float, launch_us: float, entry_bytes: int = TABLE_BYTES
) -> Floor:
    """The floor of one check. `tokens`: context of each row.

    `copy_tb_s`: bytes that a copy reads and writes, 1e12 a second. `entry_bytes`: 4 for int32 tables, 8 for int64.
    """
    pages = rows * -(-tokens // page_size)
    floor_bytes = pages * (entry_bytes + TAG_BYTES)
    per_us = copy_tb_s * 1e6
    floor_us = floor_bytes / per_us + launch_us
    return Floor(
        rows=rows,
        tokens=tokens,
        page_size=page_size,
        pages=pages,
        floor_bytes=floor_bytes,
        read_bytes=floor_bytes + rows * ROW_BYTES,
        floor_us=floor_us,
        limit_us=ALLOWED_OVER_FLOOR * floor_us,
        scattered_us=pages * (entry_bytes + SECTOR_BYTES) / per_us + launch_us,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=COPY_TB_S, help="of a copy, TB/s")
    parser.add_argument("--launch-us", type=float, default=LAUNCH_US)
    arguments = parser.parse_args()
    print("| rows | tokens | page | live pages | floor, MB | floor, us | allowed, us | tags out of L2, us |")
    print("|---|---|---|---|---|---|---|---|")
    for rows in ROWS:
        for tokens in TOKENS:
            for page_size in PAGE_SIZES:
                floor = floor_of(
                    rows, tokens, page_size, copy_tb_s=arguments.bandwidth, launch_us=arguments.launch_us
                )
                print(
                    f"| {rows} | {tokens} | {page_size} | {floor.pages} | {floor.floor_bytes / 1e6:.2f} "
                    f"| {floor.floor_us:.1f} | {floor.limit_us:.1f} | {floor.scattered_us:.1f} |"
                )


if __name__ == "__main__":
    main()
