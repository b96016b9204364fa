"""Mutations of the kernels; part of `tools.mutations.MUTATIONS`."""
# ruff: noqa: E501 -- a table whose rows are exact text

from __future__ import annotations

from typing import Final

from tools.mutation import Mutation, of_file

CORE: Final = "tests/core"
TAG: Final = f"{CORE}/test_guard_tag_proof.py"
STEPS: Final = f"{CORE}/test_steps_and_messages.py"
TAGS: Final = f"{CORE}/test_tags.py"
GENERIC: Final = f"{CORE}/test_generic_adapter.py"
TRITON: Final = "tests/kernels/test_triton.py"
CUDA: Final = "tests/kernels/test_cuda_source.py"
TOKEN_ROWS: Final = "tests/kernels/test_token_rows.py"
TOKEN_HISTORY: Final = "tests/kernels/test_token_row_history.py"
WINDOWS: Final = "tests/kernels/test_windows.py"
TOKEN_TRITON: Final = "tests/kernels/test_token_rows_triton.py"
SLOTS: Final = "tests/kernels/test_verify_slots.py"
SLOTS_TRITON: Final = "tests/kernels/test_verify_slots_triton.py"
SLOTS_CUDA: Final = "tests/kernels/test_verify_slots_cuda.py"

KERNEL_MUTATIONS: Final[tuple[Mutation, ...]] = (
    *of_file(
        "kernels/verify_pages/reference.py",
        ("numpy: the digest comparison", TAG, "if digest != int(expected[row]) & ((1 << 64) - 1):", "if False:"),
        ("numpy: the null page", TAG, "elif page == null_page:", "elif False:"),
        ("numpy: the range", TAG, "                    if not 0 <= page < len(page_tag):\n", "                    if False:\n"),
        ("numpy: the pieces of a split page", TAG, "flag |= FLAG_SPLIT", "pass"),
        ("numpy: the neutralising of reads", TAG, "table[table_row, start:stop] = neutral_page * split", "pass"),
        ("numpy: the neutralising of writes", STEPS, "slot_mapping[int(query_start[place]) : int(query_start[place + 1])] = skip_slot", "pass"),
    ),
    *of_file(
        "kernels/verify_pages/torch_op.py",
        ("torch: the digest comparison", TAG, "torch.where(digest != expected, FLAG_DIGEST, 0)", "0"),
        ("torch: the null page", TAG, "null = in_range & (page == null_page)", "null = in_range & (page == -5)"),
        ("torch: the pieces of a split page", TAG, "flag = flag | torch.where(displaced, FLAG_SPLIT, 0)", "pass"),
        ("torch: the neutralising of reads", TAG, "_neutralise_reads(table, row_index, flagged, live, split, neutral_page * split)", "pass"),
        ("torch: the neutralising of writes", "tests/kernels/test_verify_pages.py", "slot_mapping.copy_(torch.where(drop, skip_slot, slot_mapping))", "pass"),
    ),
    *of_file("kernels/verify_pages/host_op.py", ("torch on a CPU: the digest comparison", TAG, "if not np.array_equal(digest, expected):", "if False:")),
    *of_file(
        "kernels/verify_pages/triton_op.py",
        ("triton: the digest comparison", TRITON, "    if digest != tl.load(packed + tl.load(pool + EXPECTED) + row):\n", "    if False:\n"),
        ("triton: the null page", TRITON, "flag = tl.where(pages == null_page, FLAG_NULL, flag)", "flag = flag"),
        ("triton: vacant pages", TRITON, "flag = tl.where(tags == 0, FLAG_VACANT, 0)", "flag = tl.where(tags == 0, 0, 0)"),
        ("triton: negative entries", TRITON, "known = live & (pages >= 0) & (pages < num_pages)", "known = live & (pages < num_pages)"),
        ("triton: the pieces of a split page", TRITON, "flag = tl.where(displaced, flag | FLAG_SPLIT, flag)", "flag = flag"),
        ("triton: the column in the digest", TRITON, "(columns.to(tl.int64).to(tl.uint64) * COLUMN_MULTIPLIER + key)", "key"),
        ("triton: a shift of the mixing", TRITON, "(x ^ (x >> 27))", "(x ^ (x >> 28))"),
        ("triton: the first bad column", TRITON, "first_bad = tl.minimum(first_bad, ", "first_bad = tl.maximum(0, "),
        ("triton: the neutralising of reads", TRITON, "                    _neutralise_row(pool, packed, row, BLOCK, TYPES)\n", "                    pass\n"),
        ("triton: the neutralising of writes", TRITON, "                        _neutralise_slots(pool, packed, row, BLOCK)\n", "                        pass\n"),
        ("triton: evidence before anything is overwritten", TRITON, "                    _capture(pool, packed, out, BLOCK, TYPES)\n", "                    _neutralise(pool, packed, out, BLOCK, TYPES)\n                    _capture(pool, packed, out, BLOCK, TYPES)\n"),
        ("triton: the sum over the parts of a row", TRITON, "tl.atomic_add(of_row + 1, digest, sem=\"relaxed\")", "pass"),
        ("triton: a workspace that is left at zero", TRITON, "                tl.atomic_xchg(of_row, 0, sem=\"relaxed\")\n", ""),
        ("triton: 64 bits for offsets in a table", TRITON, "table_row * tl.load(pool + TABLE_ROW_STRIDE) * item_bytes", "(table_row * tl.load(pool + TABLE_ROW_STRIDE) * item_bytes & 0x7FFFFFFF)"),
    ),
    *of_file(
        "kernels/verify_pages/cuda_source.py",
        ("cuda: the flags of a row", CUDA, "    found.flags |= flag;\n", ""),
        ("cuda: the last ticket", CUDA, "last = atomicAdd(counter, 1ull) == tickets - 1;", "last = atomicAdd(counter, 1ull) == 0;"),
    ),
    *of_file("kernels/scatter_tags/triton_op.py", ("triton: each pool's own tags", TRITON, "tl.load(packed + tl.load(pool + TAGS) + change,", "tl.load(packed + tl.load(pool + PAGES) + change,")),
    *of_file("kernels/scatter_tags/reference.py", ("numpy: the tag mirror", STEPS, "page_tag[page] = tag", "pass")),
    *of_file("kernels/scatter_tags/torch_op.py", ("torch: the tag mirror", "tests/kernels/test_scatter_tags.py", "page_tag.index_add_(0, target, torch.where(inside, tags - page_tag[target], 0))", "pass")),
    *of_file("kernels/mixing.py", ("the column in the digest", GENERIC, "(columns * _COLUMN_MULTIPLIER + np.array(key, np.uint64))", "np.array(key, np.uint64)")),
    *of_file(
        "kernels/stamp_rows/torch_op.py",
        ("the page in use that is stamped, on token rows", TOKEN_ROWS, "stamped & ((before != 0) | ~won)", "stamped & ~won"),
        ("the page that is opened twice, on token rows", TOKEN_ROWS, "stamped & ((before != 0) | ~won)", "stamped & (before != 0)"),
        ("the promise of a stamped page, on token rows", TOKEN_ROWS, "term = torch.where(stamped, mix_tensor(key, column, tag), 0)", "term = torch.where(won, mix_tensor(key, column, tag), 0)"),
        ("what a fresh row begins with", TOKEN_ROWS, "torch.where(fresh, chain - digest[target], 0)", "torch.where(fresh, chain, 0)"),
        ("a prefix of other content", TOKEN_HISTORY, "chain = chain + torch.where(other, SPOILED, 0)", "pass"),
        ("the report of a prefix of other content", TOKEN_HISTORY, "row_codes = torch.where(other, CONTENT, row_codes)", "pass"),
    ),
    *of_file(
        "kernels/stamp_rows/host_op.py",
        ("a page in use, in the short way of decode", TOKEN_ROWS, " or page_tag[page].any():", ":"),
        ("a page that is opened twice, in the short way of decode", TOKEN_ROWS, "    if not np.array_equal(page_tag[page], tag):\n", "    if False:\n"),
    ),
    *of_file(
        "kernels/stamp_rows/triton_op.py",
        ("a prefix of other content, in Triton", TOKEN_TRITON, "begin += tl.where(other, SPOILED, 0)", "pass"),
        ("the place of whom a token displaces", TOKEN_TRITON, "tl.where((codes == DOUBLE_ALLOCATION) & of_call, earlier, token)", "token"),
    ),
    *of_file(
        "kernels/retire_pages/torch_op.py",
        ("the page that comes twice, given back", TOKEN_ROWS, "twice = twice | (given & (page_tag[target] != place))", "pass"),
        ("the page that somebody else holds, given back", TOKEN_ROWS, "    given = given & ~foreign\n", ""),
        ("callers that cannot say whose page it is", TOKEN_ROWS, " & (by != ANYBODY) & (by != UNSAID)\n    given", " & (by != UNSAID)\n    given"),
        ("the chain of a page that nobody knows to have freed", TOKEN_HISTORY, "(holder == TREE) & (by != ANYBODY)", "(holder == TREE)"),
        ("the owner of what is given back", TOKEN_ROWS, "for of_page in (page_tag, page_owner):", "for of_page in (page_tag,):"),
        ("the chain of what the tree gives back", TOKEN_ROWS, "    page_chain.index_put_((torch.where(evicted, page, NULL_PAGE),), left)\n", ""),
    ),
    *of_file(
        "kernels/retire_pages/triton_op.py",
        ("the page that somebody else holds, given back by Triton", TOKEN_TRITON, "    given = given & (foreign == 0)\n", ""),
        ("the look at all tokens before the first is given back", TOKEN_TRITON, "((True, False), (False, True))", "((True, True),)"),
    ),
    *of_file(
        "kernels/publish_row/torch_op.py",
        ("the error in the chains of a row", TOKEN_HISTORY, "torch.where(own, run + error + chains, page_chain[NULL_PAGE])", "torch.where(own, run + chains, page_chain[NULL_PAGE])"),
        ("the mark of a page that another node names", TOKEN_HISTORY, "torch.where(own, run + error + chains, page_chain[NULL_PAGE])", "torch.where(own, run + error, page_chain[NULL_PAGE])"),
        ("the error that stays with a row", TOKEN_HISTORY, "run[-1:] + terms[columns:].sum() + error", "run[-1:] + terms[columns:].sum()"),
        ("a page of other content in a row's place", TOKEN_HISTORY, "error = error + torch.where(other.any(), SPOILED, 0)", "pass"),
        ("the report of a page of other content in a row's place", TOKEN_HISTORY, "write_first(event, torch.where(other, CONTENT, 0), page, place, place)", "pass"),
        ("the content of what is published", TOKEN_HISTORY, "torch.where(own.unsqueeze(1), content, page_content[NULL_PAGE])", "page_content[target]"),
        ("the owner of what is published", TOKEN_ROWS, "own = own & (page_owner[page] == column + owner_of(row, 0))", "pass"),
    ),
    *of_file(
        "kernels/publish_row/triton_op.py",
        ("a page of other content in a row's place, in Triton", TOKEN_TRITON, "            error += SPOILED\n", ""),
        ("the content of what is published, in Triton", TOKEN_TRITON, "            tl.store(page_content + page * LANES + lane, word, mask=own)\n", ""),
        ("the path behind a page of the tree", TOKEN_TRITON, "tl.where(next_restarts != 0, next_value, value + next_value)", "value + next_value"),
        ("the mark of a page that another node names, in Triton", TOKEN_TRITON, "mask=own, other=0) + left, mask=own)", "mask=own, other=0), mask=own)"),
        ("chains that are read before any is written", TOKEN_TRITON, "        tl.store(chains + place, run + error, mask=place < columns)\n", "        tl.store(chains + place, run + error, mask=place < columns)\n        tl.store(page_chain + page, run + error, mask=own)\n"),
    ),
    *of_file(
        "kernels/verify_rows/torch_op.py",
        ("the mark of a flagged row", TOKEN_HISTORY, "torch.where(flagged & known, SPOILED, 0)", "torch.where(flagged & known, 0, 0)"),
        ("the page of a column's other tokens", TOKEN_ROWS, "(slot % page_size != piece) | (page != head)", "(slot % page_size != piece)"),
        ("slots outside of the pool in a flagged row", TOKEN_ROWS, "((slot < 0) | (slot >= slots_end))", "(slot < 0)"),
    ),
    *of_file(
        "kernels/torch_events.py",
        ("the second lane of a content", TOKEN_ROWS, "(page_content == content).all(1)", "(page_content == content)[:, 0]"),
        ("the content of which nothing was said", TOKEN_ROWS, " & (page_content != 0).any(1)", ""),
    ),
    *of_file(
        "kernels/triton_events.py",
        ("the second lane of a content, in Triton", TOKEN_TRITON, "    same = same & (second == tl.load(content + place * LANES + 1, mask=mask, other=1))\n", ""),
        ("the content of which nothing was said, in Triton", TOKEN_TRITON, "same & ((first | second) != 0)", "same"),
    ),
    *of_file(
        "kernels/torch_slots.py",
        ("the tokens of a flagged row", TOKEN_ROWS, "drop = owned & flagged[place.clamp(max=batch - 1)]", "drop = owned & False"),
    ),
    *of_file(
        "kernels/verify_rows/host_op.py",
        ("the order of tokens in their pages, in the short way", TOKEN_ROWS, "        if ((table[rows, :width] != wanted)", "        if False and ((table[rows, :width] != wanted)"),
        ("the digest, in the short way", TOKEN_HISTORY, "    if not np.array_equal(found, digest[rows]):\n", "    if False:\n"),
    ),
    *of_file(
        "kernels/verify_rows/triton_op.py",
        ("all rows judged before one is changed", TOKEN_TRITON, "tl.atomic_add(workspace, 1, sem=\"acq_rel\", scope=\"gpu\") == batch - 1", "tl.atomic_add(workspace, 1, sem=\"acq_rel\", scope=\"gpu\") >= 0"),
        ("positions past the table", TOKEN_TRITON, "        flags |= FLAG_RANGE\n", "        flags |= 0\n"),
    ),
    *of_file(
        "kernels/pair_windows/torch_op.py",
        ("a window page that is in use already", WINDOWS, "((before != 0) | ~won)", "~won"),
        ("a window page without a tag that goes over", WINDOWS, "codes = torch.where(paired & (before == 0), VACANT, 0)", "codes = torch.where(paired, 0, 0)"),
        ("pages that are paired whole", WINDOWS, "paired = heads & inside", "paired = inside"),
    ),
    *of_file(
        "kernels/pair_windows/host_op.py",
        ("a window page that is in use already, in the short way", WINDOWS, "if tags.any() or len", "if len"),
    ),
    *of_file(
        "kernels/pair_windows/triton_op.py",
        ("who was displaced from a window page", WINDOWS, "place = tl.where(of_call, earlier, token)", "place = token"),
    ),
    *of_file(
        "kernels/verify_windows/torch_op.py",
        ("the tag of a window page", WINDOWS, "bad = live & ~(kept & (tag == peer_tag[slot // page_size]))", "bad = live & ~kept"),
        ("the first position of a window", WINDOWS, "(1 if bounds is None else bounds[1:] - bounds[:-1]) - window", "(1 if bounds is None else bounds[1:] - bounds[:-1]) - window + 1"),
        ("window slots outside of the pool in a flagged row", WINDOWS, "outside = (peer < 0) | (peer >= window_tag.shape[0] * page_size)", "outside = peer < 0"),
    ),
    *of_file(
        "kernels/verify_windows/host_op.py",
        ("the tag of a window page, in the short way", WINDOWS, "((tag == peer_tag[slot // page_size]) & (tag != 0)).all()", "(tag != 0).all()"),
        ("the first position of a window, in the short way", WINDOWS, "first = np.maximum(lengths - queries - window, 0)", "first = np.maximum(lengths - queries - window + 1, 0)"),
    ),
    *of_file(
        "kernels/verify_windows/triton_op.py",
        ("the piece of a window page", WINDOWS, "(tag != 0) & (peer - page * PAGE_SIZE == position % PAGE_SIZE)", "(tag != 0)"),
    ),
    *of_file(
        "kernels/verify_slots/reference.py",
        ("slots, numpy: slots sent nowhere", SLOTS, "return 0 if skip_allowed else SLOT_LOST", "return 0"),
        ("slots, numpy: slots of the null page", SLOTS, "if slot == skip_slot or (inside and page == null_page):", "if slot == skip_slot:"),
        ("slots, numpy: negative positions", SLOTS, "if position < 0 or (floor is not None and position < floor[row]):", "if floor is not None and position < floor[row]:"),
        ("slots, numpy: the floor", SLOTS, "if position < 0 or (floor is not None and position < floor[row]):", "if position < 0:"),
        ("slots, numpy: slots outside of the pool", SLOTS, "return flags | SLOT_RANGE", "return flags"),
        ("slots, numpy: negative slots", SLOTS, "0 <= slot < len(page_writer) * page_size", "slot < len(page_writer) * page_size"),
        ("slots, numpy: words that are nobody's", SLOTS, "if word <= 0 or word != signed64", "if word != signed64"),
        ("slots, numpy: the words of pages", SLOTS, "word != signed64(int(writer[row]) + column) or ", ""),
        ("slots, numpy: whose word it is", SLOTS, "int(writer[row]) + column)", "int(word) >> 32 << 32 | column)"),
        ("slots, numpy: columns that are in no word", SLOTS, " or column >= 1 << ROW_SHIFT", ""),
        ("slots, numpy: offsets", SLOTS, "flags |= SLOT_OFFSET", "pass"),
        ("slots, numpy: padding", SLOTS, "padding = ~owned & (slot_mapping != skip_slot)", "padding = owned & False"),
        ("slots, numpy: the redirection", SLOTS, "slot_mapping[wrong | padding] = skip_slot", "slot_mapping[padding] = skip_slot"),
        ("slots, numpy: the redirection of padding", SLOTS, "slot_mapping[wrong | padding] = skip_slot", "slot_mapping[wrong] = skip_slot"),
    ),
    *of_file(
        "kernels/verify_slots/torch_op.py",
        ("slots, torch: slots sent nowhere", SLOTS, "torch.where(nowhere, 0 if skip_allowed else SLOT_LOST, flags)", "torch.where(nowhere, 0, flags)"),
        ("slots, torch: slots of the null page", SLOTS, "(slot == skip_slot) | (inside & (page == null_page))", "(slot == skip_slot)"),
        ("slots, torch: negative positions", SLOTS, "    low = position < 0\n", "    low = position < -(2**62)\n"),
        ("slots, torch: the floor", SLOTS, "low = low | (position < floor.unsqueeze(1))", "pass"),
        ("slots, torch: slots outside of the pool", SLOTS, "torch.where(inside, flags, SLOT_RANGE)", "torch.where(inside, flags, 0)"),
        ("slots, torch: negative slots", SLOTS, "(slot >= 0) & (slot < page_writer", "(slot > -2) & (slot < page_writer"),
        ("slots, torch: words that are nobody's", SLOTS, "(word > 0) & ", ""),
        ("slots, torch: the words of pages", SLOTS, "(word == writer.unsqueeze(1) + column) & ", ""),
        ("slots, torch: columns that are in no word", SLOTS, " & (column < 1 << ROW_SHIFT)", ""),
        ("slots, torch: offsets", SLOTS, "torch.where(offset != position - column * page_size, SLOT_OFFSET, 0)", "0"),
        ("slots, torch: padding", SLOTS, "padding = ~owned & (slot != skip_slot)", "padding = owned & False"),
        ("slots, torch: the redirection", SLOTS, "torch.where(wrong | padding, skip_slot", "torch.where(padding, skip_slot"),
        ("slots, torch: the redirection of padding", SLOTS, "torch.where(wrong | padding, skip_slot", "torch.where(wrong, skip_slot"),
        ("slots, torch: the ends of spans", SLOTS, "(token < stop[part].unsqueeze(1))", "(token <= stop[part].unsqueeze(1))"),
    ),
    *of_file(
        "kernels/verify_slots/host_op.py",
        ("slots, torch on a CPU: the words of pages", SLOTS, "    wrong ^= word\n", "    wrong ^= wrong\n"),
        ("slots, torch on a CPU: offsets", SLOTS, "        wrong |= offset\n", ""),
        ("slots, torch on a CPU: negative slots and positions", SLOTS, "    wrong |= sign\n", ""),
        ("slots, torch on a CPU: words that are nobody's", SLOTS, "    word -= _ONE\n", ""),
        ("slots, torch on a CPU: columns that are in no word", SLOTS, "sign |= _POSITIONS_MAX - position", "pass"),
        ("slots, torch on a CPU: the floor", SLOTS, "sign |= position - floor", "pass"),
        ("slots, torch on a CPU: padding", SLOTS, "if len(padding) and np.count_nonzero(padding != skip_slot):", "if False:"),
        ("slots, torch on a CPU: slots sent nowhere", SLOTS, "        if not skip_allowed:\n            return False\n", ""),
        ("slots, torch on a CPU: a null page that has a word", SLOTS, "page_writer[nobodys] > 0", "page_writer[nobodys] > 2**63 - 1"),
    ),
    *of_file(
        "kernels/verify_slots/triton_op.py",
        ("slots, triton: slots sent nowhere", SLOTS_TRITON, "tl.where(tl.load(pool + SKIP_ALLOWED) != 0, 0, SLOT_LOST)", "tl.where(tl.load(pool + SKIP_ALLOWED) != 0, 0, 0)"),
        ("slots, triton: slots of the null page", SLOTS_TRITON, " | (inside & (page == tl.load(pool + NULL_PAGE)))", ""),
        ("slots, triton: the floor", SLOTS_TRITON, "floor = tl.maximum(floor, tl.load(packed + tl.load(pool + FLOOR) + row))", "floor = floor"),
        ("slots, triton: negative positions and the floor", SLOTS_TRITON, "tl.where(position < floor, flags | SLOT_FLOOR, flags)", "flags"),
        ("slots, triton: slots outside of the pool", SLOTS_TRITON, "tl.where(inside, flags, SLOT_RANGE)", "tl.where(inside, flags, 0)"),
        ("slots, triton: words that are nobody's", SLOTS_TRITON, "(word > 0) & ", ""),
        ("slots, triton: the words of pages", SLOTS_TRITON, "(word == tl.load(packed + tl.load(pool + WRITER) + row) + column) & ", ""),
        ("slots, triton: columns that are in no word", SLOTS_TRITON, " & (column < COLUMNS_END)", ""),
        ("slots, triton: offsets", SLOTS_TRITON, "flags = tl.where(displaced, flags | SLOT_OFFSET, flags)", "flags = flags"),
        ("slots, triton: padding", SLOTS_TRITON, "padding = there & (mark == UNOWNED) & (slot != skip)", "padding = there & (mark == UNOWNED) & (slot != slot)"),
        ("slots, triton: the redirection", SLOTS_TRITON, "padding | (there & (mark == WRONG))", "padding"),
        ("slots, triton: the redirection of padding", SLOTS_TRITON, "padding | (there & (mark == WRONG))", "(there & (mark == WRONG))"),
        ("slots, triton: the first wrong token", SLOTS_TRITON, "first = tl.where(wrong, tl.minimum(first, token), first)", "first = tl.where(wrong, token, first)"),
        ("slots, triton: what is wrong for one of two rows", SLOTS_TRITON, "tl.where(wrong, WRONG, OWNED).to(tl.int64)", "tl.where(wrong, OWNED, WRONG - 1).to(tl.int64)"),
        ("slots, triton: all tokens judged before one is redirected", SLOTS_TRITON, "tl.atomic_add(of_pool, 1, sem=\"acq_rel\", scope=\"gpu\") == rows", "tl.atomic_add(of_pool, 1, sem=\"acq_rel\", scope=\"gpu\") >= 0"),
        ("slots, triton: marks that are clear for the next launch", SLOTS_TRITON, "        tl.store(marks + token, lanes * 0 + UNOWNED, mask=there)\n", ""),
    ),
    *of_file(
        "kernels/verify_slots/cuda_source.py",
        ("slots, cuda: slots sent nowhere", SLOTS_CUDA, "return pool[SKIP_ALLOWED] ? 0 : SLOT_LOST;", "return 0;"),
        ("slots, cuda: slots of the null page", SLOTS_CUDA, " || (inside && page == pool[NULL_PAGE])", ""),
        ("slots, cuda: negative positions", SLOTS_CUDA, "position < 0 || (pool[HAS_FLOOR]", "(pool[HAS_FLOOR]"),
        ("slots, cuda: the floor", SLOTS_CUDA, " || (pool[HAS_FLOOR] && position < packed[pool[FLOOR] + row])", ""),
        ("slots, cuda: slots outside of the pool", SLOTS_CUDA, "return flags | SLOT_RANGE;", "return flags;"),
        ("slots, cuda: words that are nobody's", SLOTS_CUDA, "word <= 0 || ", ""),
        ("slots, cuda: the words of pages", SLOTS_CUDA, "(u64)word != expected || ", ""),
        ("slots, cuda: columns that are in no word", SLOTS_CUDA, " || column >= COLUMNS_END", ""),
        ("slots, cuda: offsets", SLOTS_CUDA, "flags |= SLOT_OFFSET;", ";"),
        ("slots, cuda: padding", SLOTS_CUDA, "marks[token] == UNOWNED && slot != pool[SKIP_SLOT]", "false"),
        ("slots, cuda: the redirection", SLOTS_CUDA, "(padding || marks[token] == WRONG)", "padding"),
        ("slots, cuda: the redirection of padding", SLOTS_CUDA, "(padding || marks[token] == WRONG)", "(marks[token] == WRONG)"),
        ("slots, cuda: all tokens judged before one is redirected", SLOTS_CUDA, "if (!is_last(of_pool, (u64)rows + 1)) return;", "is_last(of_pool, (u64)rows + 1);"),
    ),
)  # fmt: skip
