"""`verify_slots_step` in CUDA C++, the same work as `triton_op.py` in the same order of memory.

As in `verify_pages.cuda_source`: the words of a descriptor come in as macros, and the source needs no header of CUDA's.
"""

from __future__ import annotations

from kvguard.kernels import events
from kvguard.kernels.verify_slots import descriptor, layout
from kvguard.kernels.verify_slots.descriptor import SlotWord

THREADS = 128
"""Threads of a block; a power of two."""

_SOURCE = r"""
typedef long long i64;
typedef unsigned long long u64;

// An element of an array of int64 or, if it is not wide, int32.
__device__ __forceinline__ i64 word_at(i64 address, i64 offset, i64 wide) {
  return wide ? ((const i64*)address)[offset] : (i64)((const int*)address)[offset];
}

__device__ __forceinline__ i64 slot_at(const i64* pool, i64 token) {
  return word_at(pool[SLOT_MAPPING], token * pool[SLOT_STRIDE], pool[SLOT_WIDE]);
}

__device__ __forceinline__ void redirect(const i64* pool, i64 token) {
  const i64 offset = token * pool[SLOT_STRIDE];
  if (pool[SLOT_WIDE]) ((i64*)pool[SLOT_MAPPING])[offset] = pool[SKIP_SLOT];
  else ((int*)pool[SLOT_MAPPING])[offset] = (int)pool[SKIP_SLOT];
}

// The tokens [start, stop) of a row that there are, and what a token's index lacks of its position, modulo 2**64.
struct Span {
  i64 start, stop;
  u64 shift;
};

__device__ Span span_of(const i64* pool, const i64* packed, i64 row) {
  i64 place = row;
  if (pool[QUERY_ROW_MODE] == QUERY_ROW_ARRAY) place = ((const i64*)pool[QUERY_ROW])[row * pool[QUERY_ROW_STRIDE]];
  if (pool[QUERY_ROW_MODE] == QUERY_ROW_IS_TABLE_ROW) place = packed[pool[ROW_INDEX] + row];
  if (place < 0 || place >= pool[PLACES]) return {0, 0, 0};
  i64 start = place, stop = place + 1;
  if (pool[QUERY_START]) {
    start = word_at(pool[QUERY_START], place * pool[QUERY_START_STRIDE], pool[QUERY_START_WIDE]);
    stop = word_at(pool[QUERY_START], (place + 1) * pool[QUERY_START_STRIDE], pool[QUERY_START_WIDE]);
  }
  const i64 length = word_at(pool[LENGTHS], place * pool[LENGTHS_STRIDE], pool[LENGTHS_WIDE]);
  const u64 shift = (u64)length - (u64)stop;
  start = start < 0 ? 0 : start < pool[TOKENS] ? start : pool[TOKENS];
  return {start, stop < pool[TOKENS] ? stop : pool[TOKENS], shift};
}

// The flags of a row's token.
__device__ __forceinline__ int judge(const i64* pool, const i64* packed, i64 row, i64 slot, i64 position) {
  const i64 page_size = pool[PAGE_SIZE];
  const bool inside = slot >= 0 && slot < pool[NUM_PAGES] * page_size;
  const i64 page = inside ? slot / page_size : 0;
  if (slot == pool[SKIP_SLOT] || (inside && page == pool[NULL_PAGE])) return pool[SKIP_ALLOWED] ? 0 : SLOT_LOST;
  const bool low = position < 0 || (pool[HAS_FLOOR] && position < packed[pool[FLOOR] + row]);
  int flags = low ? SLOT_FLOOR : 0;
  if (!inside) return flags | SLOT_RANGE;
  if (position < 0) return flags;
  const i64 column = position / page_size, word = ((const i64*)pool[PAGE_WRITER])[page];
  const u64 expected = (u64)packed[pool[WRITER] + row] + (u64)column;
  if (word <= 0 || (u64)word != expected || column >= COLUMNS_END) flags |= SLOT_PAGE;
  if (slot - page * page_size != position - column * page_size) flags |= SLOT_OFFSET;
  return flags;
}

struct Wrong {
  u64 count, flags;
  i64 first;  // NO_TOKEN: none
};

// The sum over all threads, in `wrong` of every thread.
__device__ void gather(Wrong& wrong) {
  __shared__ u64 counts[THREADS_MAX], flags[THREADS_MAX];
  __shared__ i64 firsts[THREADS_MAX];
  const int thread = threadIdx.x;
  counts[thread] = wrong.count;
  flags[thread] = wrong.flags;
  firsts[thread] = wrong.first;
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
      counts[thread] += counts[thread + half];
      flags[thread] |= flags[thread + half];
      firsts[thread] = firsts[thread] < firsts[thread + half] ? firsts[thread] : firsts[thread + half];
    }
  }
  __syncthreads();
  wrong = {counts[0], flags[0], firsts[0]};
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

__device__ void write_record(i64* record, const Wrong& wrong, i64 first, i64 slot) {
  record[0] = (i64)wrong.flags;
  record[1] = (i64)wrong.count;
  record[2] = wrong.count ? first : -1;
  record[3] = wrong.count ? slot : -1;
}

// Padding, redirection, and marks that are clear for the next launch.
__device__ void finish_pool(const i64* pool, i64* out, u64* marks) {
  __shared__ i64 first_slot;
  Wrong wrong = {0, 0, NO_TOKEN};
  i64 slot_there = -1;
  for (i64 token = threadIdx.x; token < pool[TOKENS]; token += blockDim.x) {
    const i64 slot = slot_at(pool, token);
    const bool padding = marks[token] == UNOWNED && slot != pool[SKIP_SLOT];
    if (padding) {
      if (wrong.count == 0) {
        wrong.first = token;
        slot_there = slot;
      }
      wrong.count++;
      wrong.flags = SLOT_PADDING;
    }
    if (pool[ENFORCE] && (padding || marks[token] == WRONG)) redirect(pool, token);
    marks[token] = UNOWNED;
  }
  const i64 own_first = wrong.first;
  gather(wrong);
  if (wrong.count && own_first == wrong.first) first_slot = slot_there;
  __syncthreads();
  if (threadIdx.x == 0) write_record(out + pool[RECORD] + pool[ROWS] * RECORD_WORDS, wrong, wrong.first, first_slot);
}

// Grid (chunks, rows + 1, pools); any power of two of threads up to THREADS_MAX.
extern "C" __global__ void verify_slots_step(const i64* descriptors, const i64* packed, i64* out, u64* workspace) {
  const i64* pool = descriptors + (i64)blockIdx.z * WORDS;
  const i64 row = blockIdx.y, chunk = blockIdx.x, chunks = gridDim.x, rows = pool[ROWS];
  if (row > rows || (row == rows && chunk > 0)) return;
  u64* of_pool = workspace + pool[WORKSPACE];
  u64* marks = of_pool + POOL_WORDS + rows * ROW_WORDS;
  if (row < rows) {
    const Span span = span_of(pool, packed, row);
    const i64 size = blockDim.x, blocks = span.stop > span.start ? (span.stop - span.start + size - 1) / size : 0;
    // Chunks that were given no block have no part in the row.
    const i64 least = blocks > 1 ? blocks : 1, parts = least < chunks ? least : chunks;
    if (chunk >= parts) return;
    Wrong wrong = {0, 0, NO_TOKEN};
    for (i64 block = chunk; block < blocks; block += chunks) {
      const i64 token = span.start + block * size + threadIdx.x;
      if (token >= span.stop) continue;
      const int flags = judge(pool, packed, row, slot_at(pool, token), (i64)((u64)token + span.shift));
      // Rows may share a token: what is wrong for one of them stays wrong.
      atomicMax(marks + token, flags ? (u64)WRONG : (u64)OWNED);
      if (!flags) continue;
      wrong.flags |= (u64)flags;
      wrong.count++;
      if (token < wrong.first) wrong.first = token;
    }
    gather(wrong);
    if (parts > 1) {
      u64* of_row = of_pool + POOL_WORDS + row * ROW_WORDS;
      if (threadIdx.x == 0 && wrong.flags) {
        atomicAdd(of_row + 1, wrong.count);
        atomicOr(of_row + 2, wrong.flags);
        // Kept as a distance from NO_TOKEN, so that zero, what an idle workspace holds, says none.
        atomicMax(of_row + 3, (u64)(NO_TOKEN - wrong.first));
      }
      if (!is_last(of_row, (u64)parts)) return;
      if (threadIdx.x == 0) {
        // Taken out and left at zero for the next launch.
        wrong.count = atomicExch(of_row + 1, 0ull);
        wrong.flags = atomicExch(of_row + 2, 0ull);
        wrong.first = NO_TOKEN - (i64)atomicExch(of_row + 3, 0ull);
        atomicExch(of_row, 0ull);
      }
    }
    if (threadIdx.x == 0) {
      const i64 slot = wrong.count ? slot_at(pool, wrong.first) : -1;
      write_record(out + pool[RECORD] + row * RECORD_WORDS, wrong, (i64)((u64)wrong.first + span.shift), slot);
    }
  }
  if (!is_last(of_pool, (u64)rows + 1)) return;
  if (threadIdx.x == 0) atomicExch(of_pool, 0ull);
  finish_pool(pool, out, marks);
}
"""


def macros() -> dict[str, str]:
    """Every name that the source takes from elsewhere, and its value."""
    values = {word.name: str(int(word)) for word in SlotWord}
    for module, names in (
        (layout, ("SLOT_RANGE", "SLOT_PAGE", "SLOT_OFFSET", "SLOT_FLOOR", "SLOT_LOST", "SLOT_PADDING", "RECORD_WORDS")),
        (descriptor, ("POOL_WORDS", "ROW_WORDS", "UNOWNED", "OWNED", "WRONG")),
        (descriptor, ("QUERY_ROW_ARRAY", "QUERY_ROW_IS_TABLE_ROW")),
    ):
        values |= {name: str(getattr(module, name)) for name in names}
    return values | {
        "WORDS": str(len(SlotWord)),
        "NO_TOKEN": str(descriptor.TOKENS_MAX),
        "COLUMNS_END": f"{1 << events.ROW_SHIFT}ll",
        "THREADS_MAX": str(THREADS),
    }


def source() -> str:
    """The whole text, for NVRTC, nvcc or a C++ compiler with stand-ins for what CUDA adds to the language."""
    return "".join(f"#define {name} {value}\n" for name, value in macros().items()) + _SOURCE
