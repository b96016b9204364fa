/* One call that answers for one pool of a step in host memory: does every row read its own pages, and does every token
 * go to its own slot? The module `_native` beside this file; `__init__.py` says what it is for, and the two operations
 * `verify_pages` and `verify_slots` what is right.
 *
 * It is called on every step between two forwards, with caches that the forward has emptied. So it touches what it
 * must look at and little else: no array object is made, and the arrays' memory is asked for once, when bound.
 *
 * What it reads comes from an engine that may have gone wrong, and that is what it is there to find out: every index is
 * compared with the array that it goes into before it is used, whatever contract it is under. Sums that may wrap are
 * unsigned. Each array is held for as long as the check lives, so its memory cannot go away.
 */
#define PY_SSIZE_T_CLEAN
/* One build for this Python and all later ones. */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../interface.h"
#include "../mixing.h"

#define RECORD_WORDS 4
/* A column past this is in no writer word: the words of two rows would meet. */
#define COLUMNS_END ((int64_t)1 << 32)
/* From so many entries or tokens on other threads are let in meanwhile. */
#define MANY 16384

/* An array of int32 or int64; `view.obj` is NULL where there is none. */
typedef struct {
    Py_buffer view;
    const char *data;
    int64_t length; /* of the first axis */
    int64_t stride; /* of the first axis, in bytes; any sign */
    int wide;       /* int64 */
} Array;

enum {
    /* What rows read. */
    TABLE, PAGE_TAG, ROW_INDEX, EXPECTED, EXTENT_OFFSET, EXTENT_START, EXTENT_STOP,
    /* What is written. */
    SLOT_MAPPING, QUERY_START, QUERY_ROW, LENGTHS, WRITER, FLOOR, PAGE_WRITER,
    ARRAYS
};

typedef struct {
    PyObject_HEAD
    Array array[ARRAYS];
    uint64_t key;
    int64_t split, null_page;
    int64_t whole_columns; /* manager pages that a row of the table has room for */
    int64_t page_size, skip_slot;
    int page_shift; /* the binary logarithm of the page size, -1 where it has none */
    int skip_allowed, many;
    int64_t read_records, write_records;
} HostCheck;

/* Copied, as nobody promises that an engine's view is aligned; compilers make one load of it. */
static inline int64_t load(const char *at, int wide)
{
    int64_t value;
    int32_t narrow;
    memcpy(wide ? (void *)&value : (void *)&narrow, at, wide ? sizeof value : sizeof narrow);
    return wide ? value : narrow;
}

static inline int64_t item(const Array *array, int64_t index)
{
    return load(array->data + index * array->stride, array->wide);
}

static inline int within(int64_t index, int64_t length)
{
    return (uint64_t)index < (uint64_t)length;
}

/* The page whose pieces the kernel pages from here on are, in order; -1 where they do not make up one. */
static inline int64_t whole_page(const char *at, int64_t step, int wide, int64_t split)
{
    int64_t first = load(at, wide);
    if (split == 1)
        return first;
    if (first % split)
        return -1;
    for (int64_t piece = 1; piece < split; piece++)
        if ((uint64_t)load(at + piece * step, wide) != (uint64_t)first + (uint64_t)piece)
            return -1;
    return first / split;
}

static int row_is_clean(const HostCheck *self, int64_t row)
{
    const Array *table = &self->array[TABLE], *page_tag = &self->array[PAGE_TAG];
    const Array *extent_start = &self->array[EXTENT_START], *extent_stop = &self->array[EXTENT_STOP];
    const int64_t table_row = item(&self->array[ROW_INDEX], row);
    const int64_t extents_begin = item(&self->array[EXTENT_OFFSET], row);
    const int64_t extents_end = item(&self->array[EXTENT_OFFSET], row + 1);
    const int64_t step = table->view.strides[1];
    uint64_t digest = 0;

    /* Each row has one at least. */
    if (extents_begin < 0 || extents_begin >= extents_end || extents_end > extent_start->length)
        return 0;
    for (int64_t extent = extents_begin; extent < extents_end; extent++) {
        const int64_t start = item(extent_start, extent), stop = item(extent_stop, extent);
        if (start >= stop)
            continue;
        /* A row that reads nothing may be anywhere. */
        if (!within(table_row, table->length) || start < 0 || stop > self->whole_columns)
            return 0;
        const char *entries = table->data + table_row * table->stride;
        for (int64_t column = start; column < stop; column++) {
            const int64_t page = whole_page(entries + column * self->split * step, step, table->wide, self->split);
            if (!within(page, page_tag->length) || page == self->null_page)
                return 0;
            const int64_t tag = item(page_tag, page);
            if (tag == 0)
                return 0;
            digest += mix(self->key, (uint64_t)column, (uint64_t)tag);
        }
    }
    return digest == (uint64_t)item(&self->array[EXPECTED], row);
}

/* Of a position or a slot that is not negative. */
static inline int64_t page_of(const HostCheck *self, int64_t place)
{
    return self->page_shift >= 0 ? place >> self->page_shift : place / self->page_size;
}

/* The tokens [begin, end) of a row; the last of its span, at `stop` - 1, has the position `length` - 1. */
static int tokens_are_right(const HostCheck *self, int64_t row, int64_t begin, int64_t end, uint64_t length,
                            uint64_t stop)
{
    const Array *slots = &self->array[SLOT_MAPPING], *page_writer = &self->array[PAGE_WRITER];
    const uint64_t writer = (uint64_t)item(&self->array[WRITER], row);
    int64_t floor = self->array[FLOOR].view.obj ? item(&self->array[FLOOR], row) : 0;
    if (floor < 0)
        floor = 0;
    for (int64_t token = begin; token < end; token++) {
        const int64_t slot = item(slots, token);
        const int64_t page = slot >= 0 ? page_of(self, slot) : -1;
        const int inside = within(page, page_writer->length);
        if (slot == self->skip_slot || (inside && page == self->null_page)) {
            if (!self->skip_allowed)
                return 0;
            continue;
        }
        const int64_t position = (int64_t)(length - (stop - (uint64_t)token));
        if (!inside || position < floor)
            return 0;
        const int64_t column = page_of(self, position), word = item(page_writer, page);
        if (word <= 0 || (uint64_t)word != writer + (uint64_t)column || column >= COLUMNS_END)
            return 0;
        if (slot - page * self->page_size != position - column * self->page_size)
            return 0;
    }
    return 1;
}

/* `owned`: a byte for each token, all zero. */
static int writes_are_right(const HostCheck *self, unsigned char *owned)
{
    const Array *slots = &self->array[SLOT_MAPPING], *lengths = &self->array[LENGTHS];
    const Array *query_start = &self->array[QUERY_START], *query_row = &self->array[QUERY_ROW];
    const int64_t tokens = slots->length, rows = self->array[WRITER].length;
    int64_t looked_at = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t place = query_row->view.obj ? item(query_row, row) : row;
        if (!within(place, lengths->length))
            continue;
        const int64_t start = query_start->view.obj ? item(query_start, place) : place;
        const int64_t stop = query_start->view.obj ? item(query_start, place + 1) : place + 1;
        const int64_t begin = start > 0 ? start : 0, end = stop < tokens ? stop : tokens;
        if (begin >= end)
            continue;
        /* Spans that overlap are no engine's, and would take rows times tokens. */
        if (end - begin > tokens - looked_at)
            return 0;
        looked_at += end - begin;
        memset(owned + begin, 1, (size_t)(end - begin));
        if (!tokens_are_right(self, row, begin, end, (uint64_t)item(lengths, place), (uint64_t)stop))
            return 0;
    }
    for (int64_t token = 0; token < tokens; token++)
        if (!owned[token] && item(slots, token) != self->skip_slot)
            return 0;
    return 1;
}

static int is_clean(const HostCheck *self)
{
    for (int64_t row = 0; row < self->read_records; row++)
        if (!row_is_clean(self, row))
            return 0;
    if (!self->write_records)
        return 1;
    /* One more, as of no bytes there may be no address. */
    unsigned char *owned = calloc((size_t)self->array[SLOT_MAPPING].length + 1, 1);
    /* Without memory nothing is known. */
    const int right = owned && writes_are_right(self, owned);
    free(owned);
    return right;
}

static PyObject *check(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    HostCheck *self = (HostCheck *)object;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "check takes a record and the index of the pool");
        return NULL;
    }
    Py_buffer record;
    const Py_ssize_t pool = PyLong_AsSsize_t(arguments[1]);
    if (pool == -1 && PyErr_Occurred())
        return NULL;
    if (PyObject_GetBuffer(arguments[0], &record, PyBUF_ND | PyBUF_WRITABLE))
        return NULL;
    const int64_t records = self->read_records + self->write_records;
    if (record.ndim != 3 || record.itemsize != 8 || !within(pool, record.shape[0]) || record.shape[1] != records
        || record.shape[2] != RECORD_WORDS || (uintptr_t)record.buf % sizeof(int64_t)) {
        PyBuffer_Release(&record);
        PyErr_SetString(PyExc_ValueError, "record must be int64 [pools, records, 4], and the pool one of them");
        return NULL;
    }
    PyThreadState *thread = self->many ? PyEval_SaveThread() : NULL;
    const int clean = is_clean(self);
    if (thread)
        PyEval_RestoreThread(thread);
    if (clean) {
        int64_t *words = (int64_t *)record.buf + pool * records * RECORD_WORDS;
        /* The digest of a clean row is the one that was expected. */
        for (int64_t row = 0; row < records; row++, words += RECORD_WORDS) {
            words[0] = 0;
            words[1] = row < self->read_records ? item(&self->array[EXPECTED], row) : 0;
            words[2] = words[3] = -1;
        }
    }
    PyBuffer_Release(&record);
    return PyBool_FromLong(clean);
}

/* -1 with an error set where it is not an array of this kind; None is no array. */
static int take(Array *array, PyObject *given, int dimensions)
{
    if (given == Py_None)
        return 0;
    if (PyObject_GetBuffer(given, &array->view, PyBUF_STRIDES | PyBUF_FORMAT)) {
        array->view.obj = NULL;
        return -1;
    }
    const char *format = array->view.format ? array->view.format : "";
    if (array->view.ndim != dimensions || !*format || !strchr("ilq", format[0]) || format[1]
        || (array->view.itemsize != 4 && array->view.itemsize != 8)) {
        PyErr_SetString(PyExc_ValueError, "expected arrays of int32 or int64");
        return -1;
    }
    array->data = array->view.buf;
    array->length = array->view.shape[0];
    array->stride = array->view.strides[0];
    array->wide = array->view.itemsize == 8;
    return 0;
}

/* Whether the arrays of what rows read fit together, or there are none, and no sum of what follows from their sizes
 * wraps. */
static int reads_fit(HostCheck *self)
{
    const Array *array = self->array;
    int given = 0;
    for (int place = TABLE; place <= EXTENT_STOP; place++)
        given += array[place].view.obj != NULL;
    if (given <= EXTENT_STOP - TABLE)
        return !given;
    self->read_records = array[ROW_INDEX].length;
    if (self->split < 1 || array[PAGE_TAG].length > INT64_MAX / self->split)
        return 0;
    self->whole_columns = array[TABLE].view.shape[1] / self->split;
    return array[EXPECTED].length == self->read_records && array[EXTENT_OFFSET].length == self->read_records + 1
        && array[EXTENT_START].length == array[EXTENT_STOP].length;
}

/* The same of what is written. */
static int writes_fit(HostCheck *self)
{
    const Array *array = self->array;
    int given = 0, optional = 0;
    for (int place = SLOT_MAPPING; place < ARRAYS; place++) {
        given += array[place].view.obj != NULL;
        optional += array[place].view.obj && (place == QUERY_START || place == QUERY_ROW || place == FLOOR);
    }
    if (given - optional < 4)
        return !given;
    const int64_t rows = array[WRITER].length;
    if (self->page_size < 1 || array[PAGE_WRITER].length > INT64_MAX / self->page_size)
        return 0;
    self->page_shift = -1;
    for (int shift = 0; shift < 63; shift++)
        if (self->page_size == (int64_t)1 << shift)
            self->page_shift = shift;
    self->write_records = rows + 1;
    return array[PAGE_WRITER].length > 0 && (!array[FLOOR].view.obj || array[FLOOR].length == rows)
        && (!array[QUERY_ROW].view.obj || array[QUERY_ROW].length == rows)
        && (!array[QUERY_START].view.obj || array[QUERY_START].length > array[LENGTHS].length);
}

/* The arrays come as a tuple in the order above. */
static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *arrays;
    long long columns, split, null_page, page_size, skip_slot;
    unsigned long long key;
    int skip_allowed;
    if (!PyArg_ParseTuple(arguments, "O!LKLLLLp", &PyTuple_Type, &arrays, &columns, &key, &split, &null_page,
                          &page_size, &skip_slot, &skip_allowed))
        return NULL;
    if (PyTuple_Size(arrays) != ARRAYS) {
        PyErr_SetString(PyExc_TypeError, "HostCheck takes all arrays, None in place of one that is not there");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    /* Zeroed: no array is held yet, and neither half is checked. */
    HostCheck *self = (HostCheck *)allocate(type, 0);
    if (!self)
        return NULL;
    self->key = key;
    self->split = split;
    self->null_page = null_page;
    self->page_size = page_size;
    self->skip_slot = skip_slot;
    self->skip_allowed = skip_allowed;
    for (int place = 0; place < ARRAYS; place++)
        if (take(&self->array[place], PyTuple_GetItem(arrays, place), place == TABLE ? 2 : 1))
            goto refused;
    if (!reads_fit(self) || !writes_fit(self)) {
        PyErr_SetString(PyExc_ValueError, "the arrays do not fit together");
        goto refused;
    }
    const double entries = (double)self->read_records * (double)columns * (double)split;
    self->many = entries > MANY || self->array[SLOT_MAPPING].length > MANY;
    return (PyObject *)self;
refused:
    Py_DECREF(self);
    return NULL;
}

static void forget(PyObject *object)
{
    HostCheck *self = (HostCheck *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (int place = 0; place < ARRAYS; place++)
        if (self->array[place].view.obj)
            PyBuffer_Release(&self->array[place].view);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"check", (PyCFunction)(void (*)(void))check, METH_FASTCALL,
     "Whether all is clean; the pool's records are then written."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots_of_type[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, forget},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec type_of_check = {
    .name = "kvguard.kernels.host_check._native.HostCheck",
    .basicsize = sizeof(HostCheck),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots_of_type,
};

static int fill(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&type_of_check);
    if (!type)
        return -1;
    const int failed = PyModule_AddObjectRef(module, "HostCheck", type);
    Py_DECREF(type);
    return failed ? failed : PyModule_AddIntConstant(module, "INTERFACE", KVGUARD_INTERFACE);
}

static PyModuleDef_Slot slots_of_module[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_size = 0,
    .m_slots = slots_of_module,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
