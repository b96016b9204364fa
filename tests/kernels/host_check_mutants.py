"""Copies of the C source in which one thing is taken out, and which of them give a wrong answer.

`python -m tests.kernels.host_check_mutants FOLDER` asks every extension in the folder, each in a process of its own, as
a look past an array may crash. It prints JSON: file name -> the first wrong answer, None where all were right.
"""
# ruff: noqa: E501

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest import mock

from kvguard.kernels import host_check
from tests.kernels.host_check_cases import Asked, all_asked, problem

SEEDS = 48
DIED = "it died"
# (what is missing, old text, new text), each once in the source.
MUTANTS = (
    ("the multiplier of tags", "(tag * 0x9E3779B97F4A7C15u)", "(tag * 0x9E3779B97F4A7C17u)"),
    ("the column in a term", "column * 0xD1342543DE82EF95u + key", "key"),
    ("the key in a term", "column * 0xD1342543DE82EF95u + key", "column * 0xD1342543DE82EF95u"),
    ("the first shift", "x >> 30", "x >> 31"),
    ("the second shift", "x >> 27", "x >> 28"),
    ("the last shift", "return x ^ (x >> 31);", "return x;"),
    ("the first piece of a page", "if (first % split)", "if (0)"),
    ("the other pieces of a page", "piece = 1; piece < split", "piece = split; piece < split"),
    ("the last piece of a page", "piece = 1; piece < split", "piece = 1; piece + 1 < split"),
    ("the first of several pieces", "piece = 1; piece < split", "piece = 2; piece < split"),
    ("the page of a kernel page", "return first / split;", "return first;"),
    ("extents before the list", "extents_begin < 0 || ", ""),
    ("rows without extents", "extents_begin >= extents_end || ", ""),
    ("extents past the list", " || extents_end > extent_start->length", ""),
    ("all extents of a row", "extent < extents_end; extent++", "extent < extents_begin + 1; extent++"),
    ("extents that are empty", "if (start >= stop)\n            continue;", "if (start == stop)\n            return 0;"),
    ("rows outside of the table", "!within(table_row, table->length) || ", ""),
    ("columns before the table", "start < 0 || ", ""),
    ("columns past the table", "|| stop > self->whole_columns", ""),
    ("the last column", "column = start; column < stop;", "column = start; column + 1 < stop;"),
    ("the first column", "column = start; column < stop;", "column = start + 1; column < stop;"),
    ("the stride of columns", "step = table->view.strides[1]", "step = table->view.itemsize"),
    ("the stride of rows", "table->data + table_row * table->stride", "table->data + table_row * table->view.shape[1] * step"),
    ("the width of entries", "array->wide = array->view.itemsize == 8", "array->wide = 1"),
    ("pages outside of the pool", "!within(page, page_tag->length) || ", ""),
    ("the null page, read", " || page == self->null_page)\n                return 0;", ")\n                return 0;"),
    ("vacant pages", "if (tag == 0)", "if (0)"),
    ("the digest", "return digest == (uint64_t)item(&self->array[EXPECTED], row);", "return 1;"),
    ("the high half of the digest", "return digest == (uint64_t)", "return (uint32_t)digest == (uint32_t)"),
    ("the logarithm of the page size", "place >> self->page_shift :", "place >> (self->page_shift + 1) :"),
    ("the floor", "self->array[FLOOR].view.obj ? item(&self->array[FLOOR], row) : 0", "0"),
    ("negative positions below a negative floor", "    if (floor < 0)\n        floor = 0;\n", ""),
    ("negative positions without a floor", "item(&self->array[FLOOR], row) : 0;\n    if (floor < 0)", "item(&self->array[FLOOR], row) : INT64_MIN;\n    if (floor < 0 && floor != INT64_MIN)"),
    ("negative slots", "slot >= 0 ? page_of(self, slot) : -1", "page_of(self, slot)"),
    ("the skip slot", "slot == self->skip_slot || ", ""),
    ("the null page, written", " || (inside && page == self->null_page)", ""),
    ("a null page that is inside", "(inside && page == self->null_page)", "page == self->null_page"),
    ("lost tokens", "if (!self->skip_allowed)\n                return 0;", "if (0)\n                return 0;"),
    ("tokens that may be lost", "if (!self->skip_allowed)\n                return 0;", "return 0;"),
    ("the end of a span, in a position", "length - (stop - (uint64_t)token)", "length - ((uint64_t)end - (uint64_t)token)"),
    ("slots outside of the pool", "if (!inside || position < floor)", "if (position < floor)"),
    ("positions below the floor", "if (!inside || position < floor)", "if (!inside)"),
    ("words that are nobody's", "word <= 0 || ", ""),
    ("words of nothing", "word <= 0 || ", "word < 0 || "),
    ("the words of pages", "(uint64_t)word != writer + (uint64_t)column || ", ""),
    ("the column in a word", "(uint64_t)word != writer + (uint64_t)column", "(uint64_t)word >> 32 != writer >> 32"),
    ("columns that are in no word", " || column >= COLUMNS_END", ""),
    ("offsets", "if (slot - page * self->page_size != position - column * self->page_size)", "if (0)"),
    ("places of rows", "query_row->view.obj ? item(query_row, row) : row;", "row;"),
    ("rows without a place", "        if (!within(place, lengths->length))\n            continue;\n", ""),
    ("rows without a place, passed", "(!within(place, lengths->length))\n            continue;", "(!within(place, lengths->length))\n            return 0;"),
    ("spans", "query_start->view.obj ? item(query_start, place) : place;", "place;"),
    ("spans before the tokens", "begin = start > 0 ? start : 0", "begin = start"),
    ("spans past the tokens", "end = stop < tokens ? stop : tokens", "end = stop"),
    ("more tokens than there are", "if (end - begin > tokens - looked_at)", "if (0)"),
    ("marks of tokens", "        memset(owned + begin, 1, (size_t)(end - begin));\n", ""),
    ("marks of one token more", "1, (size_t)(end - begin)", "1, (size_t)(end - begin + (end < tokens))"),
    ("tokens", "if (!tokens_are_right(self, row, begin, end, (uint64_t)item(lengths, place), (uint64_t)stop))", "if (0)"),
    ("padding", "if (!owned[token] && item(slots, token) != self->skip_slot)", "if (0)"),
    ("padding in the null page", "item(slots, token) != self->skip_slot)", "item(slots, token) != self->skip_slot && item(slots, token) / self->page_size != self->null_page)"),
    ("the last token of padding", "for (int64_t token = 0; token < tokens; token++)\n        if (!owned", "for (int64_t token = 0; token + 1 < tokens; token++)\n        if (!owned"),
    ("what rows read", "if (!row_is_clean(self, row))", "if (0)"),
    ("what is written", "const int right = owned && writes_are_right(self, owned);", "const int right = owned != NULL;"),
    ("what is written, beside what is read", "if (!self->write_records)", "if (self->read_records)"),
    ("the pool in the record", "(int64_t *)record.buf + pool * records * RECORD_WORDS", "(int64_t *)record.buf"),
    ("the flags in the record", "words[0] = 0;", ";"),
    ("the digest in the record", "row < self->read_records ? item(&self->array[EXPECTED], row) : 0", "0"),
    ("no digest in the record of what is written", "row < self->read_records ? item(&self->array[EXPECTED], row) : 0", "self->read_records ? item(&self->array[EXPECTED], row % self->read_records) : 0"),
    ("the rest of the record", "words[2] = words[3] = -1;", ""),
    ("the record of the padding", "row < records; row++, words", "row < records - (self->write_records > 0); row++, words"),
    ("a record that is written too early", "    if (clean) {\n        int64_t", "    {\n        int64_t"),
)  # fmt: skip


def first_problem(extension: Path, cases: list[Asked]) -> str | None:
    """The first wrong answer of this extension."""
    loader = importlib.machinery.ExtensionFileLoader("_native", str(extension))
    spec = importlib.util.spec_from_loader("_native", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    with mock.patch.object(host_check, "_native", module):
        for case in cases:
            wrong = problem(host_check.bind, case)
            if wrong is not None:
                return f"{case.name}: {wrong[:200]}"
    return None


def in_a_process(extension: Path, cases: list[Asked]) -> str | None:
    """The same, of an extension that may crash or never end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(30)
        os.write(writer, json.dumps(first_problem(extension, cases)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 and text else DIED


def main(folder: str) -> None:
    """Ask every extension in the folder."""
    cases = all_asked(SEEDS)
    print(json.dumps({path.stem: in_a_process(path, cases) for path in sorted(Path(folder).glob("*.so"))}))


if __name__ == "__main__":
    main(sys.argv[1])
