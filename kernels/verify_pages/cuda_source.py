"""`verify_step` in CUDA C++, the same work as `triton_op.py` in the same order of memory.

The words of a descriptor come in as macros, so that the two sides cannot disagree. The source needs no header of
CUDA's: NVRTC and nvcc take it as it is, and a test runs it on a CPU with a page of stand-ins.
"""

from __future__ import annotations

from kvguard.kernels import mixing
from kvguard.kernels.verify_pages import descriptor, layout
from kvguard.kernels.verify_pages.descriptor import Word

THREADS = 128
"""Threads of a block; a power of two."""

_SOURCE = r"""
typedef long long i64;
typedef unsigned long long u64;

// Entries at an offset, in elements, from the beginning of a table row.
__device__ __forceinline__ i64 entry_at(const i64* pool, i64 row_address, i64 offset) {
  return pool[TABLE_WIDE] ? ((const i64*)row_address)[offset] : (i64)((const int*)row_address)[offset];
}

__device__ __forceinline__ i64 row_address_of(const i64* pool, i64 table_row) {
  return pool[TABLE] + table_row * pool[TABLE_ROW_STRIDE] * (pool[TABLE_WIDE] ? 8 : 4);
}

// Negative entries stay negative; that is all that matters of them.
__device__ __forceinline__ i64 page_of(i64 entry, i64 split) {
  return split == 1 ? entry : entry < 0 ? -1 : entry / split;
}

__device__ __forceinline__ u64 mix(u64 key, u64 column, u64 tag) {
  u64 x = (tag * TAG_MULTIPLIER) ^ (column * COLUMN_MULTIPLIER + key);
  x = (x ^ (x >> 30)) * FINAL_MULTIPLIER_1;
  x = (x ^ (x >> 27)) * FINAL_MULTIPLIER_2;
  return x ^ (x >> 31);
}

struct Found {
  u64 digest;
  int flags;
  int bad_column;  // NO_COLUMN: none
};

// What one live entry adds to a row's verdict.
__device__ __forceinline__ void look(Found& found, const i64* pool, i64 row_address, i64 entry, i64 column, i64 width) {
  const i64 split = pool[SPLIT];
  const i64 page = page_of(entry, split);
  int flag = FLAG_RANGE;
  if (column < width && page >= 0 && page < pool[NUM_PAGES]) {
    const u64 tag = ((const u64*)pool[PAGE_TAG])[page];
    const i64 logical = split == 1 ? column : column / split;
    flag = page == pool[NULL_PAGE] ? FLAG_NULL : tag == 0 ? FLAG_VACANT : 0;
    if (split > 1) {
      const i64 head = entry_at(pool, row_address, logical * split * pool[TABLE_COLUMN_STRIDE]);
      const i64 piece = column - logical * split;
      if (entry - page * split != piece || page != page_of(head, split)) flag |= FLAG_SPLIT;
      if (piece == 0) found.digest += mix((u64)pool[KEY], (u64)logical, tag);
    } else {
      found.digest += mix((u64)pool[KEY], (u64)logical, tag);
    }
  }
  if (flag) {
    found.flags |= flag;
    if (column < found.bad_column) found.bad_column = (int)column;
  }
}

// The sum over all threads in `found` of thread 0.
__device__ void gather(Found& found) {
  __shared__ u64 digests[THREADS_MAX];
  __shared__ int flags[THREADS_MAX], columns[THREADS_MAX];
  const int thread = threadIdx.x;
  digests[thread] = found.digest;
  flags[thread] = found.flags;
  columns[thread] = found.bad_column;
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
      digests[thread] += digests[thread + half];
      flags[thread] |= flags[thread + half];
      columns[thread] = columns[thread] < columns[thread + half] ? columns[thread] : columns[thread + half];
    }
  }
  __syncthreads();
  found.digest = digests[0];
  found.flags = flags[0];
  found.bad_column = columns[0];
}

// Take a ticket behind everything that this block has written; true for the block that takes the last one.
__device__ bool is_last(u64* counter, u64 tickets) {
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counter, 1ull) == tickets - 1;
  __syncthreads();
  __threadfence();
  return last != 0;
}

__device__ void capture(const i64* pool, const i64* packed, i64* out) {
  i64 captured = 0;
  const i64 columns = pool[TABLE_COLUMNS] < pool[EVIDENCE_WIDTH] ? pool[TABLE_COLUMNS] : pool[EVIDENCE_WIDTH];
  for (i64 row = 0; row < pool[ROWS] && captured < pool[EVIDENCE_PLACES]; row++) {
    if (out[pool[RECORD] + row * RECORD_WORDS] == 0) continue;
    const i64 table_row = packed[pool[ROW_INDEX] + row];
    if (threadIdx.x == 0) out[pool[EVIDENCE_ROW] + captured] = row;
    if (table_row >= 0 && table_row < pool[TABLE_ROWS]) {
      const i64 address = row_address_of(pool, table_row);
      for (i64 column = threadIdx.x; column < columns; column += blockDim.x)
        out[pool[EVIDENCE] + captured * pool[EVIDENCE_WIDTH] + column] =
            entry_at(pool, address, column * pool[TABLE_COLUMN_STRIDE]);
    }
    captured++;
  }
}

__device__ void neutralise_reads(const i64* pool, const i64* packed, i64 row) {
  const i64 table_row = packed[pool[ROW_INDEX] + row], split = pool[SPLIT];
  if (table_row < 0 || table_row >= pool[TABLE_ROWS]) return;
  const i64 address = row_address_of(pool, table_row);
  for (i64 e = packed[pool[EXTENT_OFFSET] + row]; e < packed[pool[EXTENT_OFFSET] + row + 1]; e++) {
    const i64 start = packed[pool[EXTENT_START] + e] * split, stop = packed[pool[EXTENT_STOP] + e] * split;
    for (i64 column = (start < 0 ? 0 : start) + threadIdx.x; column < stop && column < pool[TABLE_COLUMNS];
         column += blockDim.x) {
      const i64 offset = column * pool[TABLE_COLUMN_STRIDE];
      if (pool[TABLE_WIDE]) ((i64*)address)[offset] = pool[NEUTRAL_ENTRY];
      else ((int*)address)[offset] = (int)pool[NEUTRAL_ENTRY];
    }
  }
}

__device__ __forceinline__ i64 query_start_at(const i64* pool, i64 place) {
  const i64 offset = place * pool[QUERY_START_STRIDE];
  return pool[QUERY_START_WIDE] ? ((const i64*)pool[QUERY_START])[offset]
                                : (i64)((const int*)pool[QUERY_START])[offset];
}

__device__ void neutralise_writes(const i64* pool, const i64* packed, i64 row) {
  i64 place = row;
  if (pool[QUERY_ROW_MODE] == QUERY_ROW_ARRAY) place = ((const i64*)pool[QUERY_ROW])[row * pool[QUERY_ROW_STRIDE]];
  if (pool[QUERY_ROW_MODE] == QUERY_ROW_IS_TABLE_ROW) place = packed[pool[ROW_INDEX] + row];
  if (place < 0 || place >= pool[PLACES]) return;
  const i64 start = query_start_at(pool, place), stop = query_start_at(pool, place + 1);
  for (i64 token = (start < 0 ? 0 : start) + threadIdx.x; token < stop && token < pool[TOKENS]; token += blockDim.x)
    ((i64*)pool[SLOT_MAPPING])[token * pool[SLOT_STRIDE]] = pool[SKIP_SLOT];
}

// Grid (chunks, rows, pools); any power of two of threads up to THREADS_MAX.
extern "C" __global__ void verify_step(const i64* descriptors, const i64* packed, i64* out, u64* workspace) {
  const i64* pool = descriptors + (i64)blockIdx.z * WORDS;
  const i64 row = blockIdx.y, chunk = blockIdx.x, chunks = gridDim.x;
  if (row >= pool[ROWS]) return;
  const i64 table_row = packed[pool[ROW_INDEX] + row], split = pool[SPLIT], stride = pool[TABLE_COLUMN_STRIDE];
  const bool in_table = table_row >= 0 && table_row < pool[TABLE_ROWS];
  // Columns that may be read: none of a row outside the table.
  const i64 width = in_table ? pool[TABLE_COLUMNS] : 0;
  const i64 address = row_address_of(pool, table_row);
  const i64 block_columns = (i64)blockDim.x * GROUP;
  Found found = {0, 0, NO_COLUMN};
  i64 blocks_before = 0;
  for (i64 e = packed[pool[EXTENT_OFFSET] + row]; e < packed[pool[EXTENT_OFFSET] + row + 1]; e++) {
    i64 start = packed[pool[EXTENT_START] + e] * split, stop = packed[pool[EXTENT_STOP] + e] * split;
    start = start < 0 ? 0 : start < COLUMNS_MAX ? start : COLUMNS_MAX;
    // One column past the table says as much as all of them.
    const i64 beyond = (start > width ? start : width) + 1;
    stop = stop < beyond ? stop : beyond;
    const i64 begin = start & ~(i64)(GROUP - 1);
    const i64 blocks = stop > start ? (stop - begin + block_columns - 1) / block_columns : 0;
    for (i64 block = (chunk - blocks_before % chunks + chunks) % chunks; block < blocks; block += chunks) {
      const i64 group = begin + block * block_columns + (i64)threadIdx.x * GROUP;
      i64 entries[GROUP];
      if (pool[TABLE_VECTOR] && group < width && group < stop) {
        // The row begins on a multiple of 16 bytes and holds whole groups.
        if (pool[TABLE_WIDE]) {
          const longlong2* halves = (const longlong2*)address + group / 2;
          const longlong2 low = halves[0], high = halves[1];
          entries[0] = low.x; entries[1] = low.y; entries[2] = high.x; entries[3] = high.y;
        } else {
          const int4 four = ((const int4*)address)[group / 4];
          entries[0] = four.x; entries[1] = four.y; entries[2] = four.z; entries[3] = four.w;
        }
      } else {
        for (int place = 0; place < GROUP; place++) {
          const i64 column = group + place;
          const bool live = column >= start && column < stop && column < width;
          entries[place] = live ? entry_at(pool, address, column * stride) : -1;
        }
      }
      for (int place = 0; place < GROUP; place++) {
        const i64 column = group + place;
        if (column >= start && column < stop) look(found, pool, address, entries[place], column, width);
      }
    }
    blocks_before += blocks;
  }
  // Chunks that were given no block have no part in the row.
  const i64 least = blocks_before > 1 ? blocks_before : 1;
  const i64 parts = least < chunks ? least : chunks;
  if (chunk >= parts) return;
  gather(found);

  u64* of_pool = workspace + pool[WORKSPACE];
  u64* of_row = of_pool + POOL_WORDS + row * ROW_WORDS;
  if (parts > 1) {
    if (threadIdx.x == 0) {
      atomicAdd(of_row + 1, found.digest);
      if (found.flags) {
        atomicOr(of_row + 2, (u64)found.flags);
        // Kept as a distance from NO_COLUMN, so that zero, what an idle workspace holds, says none.
        atomicMax(of_row + 3, (u64)(NO_COLUMN - found.bad_column));
      }
    }
    if (!is_last(of_row, (u64)parts)) return;
    if (threadIdx.x == 0) {
      // Taken out and left at zero for the next launch.
      found.digest = atomicExch(of_row + 1, 0ull);
      found.flags = (int)atomicExch(of_row + 2, 0ull);
      found.bad_column = NO_COLUMN - (int)atomicExch(of_row + 3, 0ull);
      atomicExch(of_row, 0ull);
    }
  }
  if (threadIdx.x == 0) {
    i64* record = out + pool[RECORD] + row * RECORD_WORDS;
    const bool bad = found.bad_column != NO_COLUMN;
    const int wrong = found.digest != (u64)packed[pool[EXPECTED] + row] ? FLAG_DIGEST : 0;
    record[0] = found.flags | wrong;
    record[1] = (i64)found.digest;
    record[2] = bad ? found.bad_column : -1;
    record[3] = bad && found.bad_column < width ? entry_at(pool, address, found.bad_column * stride) : -1;
    if (record[0]) atomicAdd(of_pool + 1, 1ull);
  }
  if (!is_last(of_pool, (u64)pool[ROWS])) return;
  __shared__ u64 flagged;
  if (threadIdx.x == 0) {
    flagged = atomicExch(of_pool + 1, 0ull);
    atomicExch(of_pool, 0ull);
  }
  __syncthreads();
  if (flagged == 0) return;
  capture(pool, packed, out);
  // Rows may share a table row: all that is captured is read before anything is overwritten.
  __syncthreads();
  if (pool[NEUTRAL_ENTRY] < 0) return;
  for (i64 r = 0; r < pool[ROWS]; r++) {
    if (out[pool[RECORD] + r * RECORD_WORDS] == 0) continue;
    neutralise_reads(pool, packed, r);
    if (pool[SLOT_MAPPING]) neutralise_writes(pool, packed, r);
  }
}
"""

NO_COLUMN = (1 << 31) - 1


def macros() -> dict[str, str]:
    """Every name that the source takes from elsewhere, and its value."""
    values = {word.name: str(int(word)) for word in Word}
    values |= {
        name: f"{getattr(mixing, name)}ull"
        for name in ("TAG_MULTIPLIER", "COLUMN_MULTIPLIER", "FINAL_MULTIPLIER_1", "FINAL_MULTIPLIER_2")
    }
    for module, names in (
        (layout, ("FLAG_DIGEST", "FLAG_NULL", "FLAG_RANGE", "FLAG_VACANT", "FLAG_SPLIT", "RECORD_WORDS")),
        (descriptor, ("POOL_WORDS", "ROW_WORDS", "QUERY_ROW_ARRAY", "QUERY_ROW_IS_TABLE_ROW", "COLUMNS_MAX")),
    ):
        values |= {name: str(getattr(module, name)) for name in names}
    return values | {
        "WORDS": str(len(Word)),
        "GROUP": str(descriptor.GROUP),
        "NO_COLUMN": str(NO_COLUMN),
        "THREADS_MAX": str(THREADS),
    }


def source() -> str:
    """The whole text, for NVRTC, nvcc or a C++ compiler with stand-ins for what CUDA adds to the language."""
    return "".join(f"#define {name} {value}\n" for name, value in macros().items()) + _SOURCE
