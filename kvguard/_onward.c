/* The inner half of kvguard.onward: decode in which pages are crossed, for the usual case.

   `advance` comes to what `_pages_to_take`, `_publications_to_make` and `_take` of kvguard/onward.py come to, on the
   same Python objects. It looks at everything before it changes anything; what is not the usual case is answered with
   NotImplemented, and then nothing has changed and the Python way decides. */

#include "_onward_look.h"
#include "kernels/mixing.h"

/* -- changing: 1, or 0 with an exception, which leaves books that prove nothing ------------------------------------ */

/* `PageTable.allocate_each` of one page: the record is the request's, under the tag. */
static int hand_out(Work *work, Taken *take, PyObject *tag, PyObject *page_record)
{
    PyObject *request = get(work, take->state, s_id);
    if (request == NULL)
        return 0;
    if (take->record == NULL) {
        PyObject *record = take->record = bare(&work->references, page_record);
        if (record == NULL || !set_new(record, s_holders, PySet_New(NULL)) || !set(record, s_publication, Py_None) ||
            !set(record, s_promise, Py_None) || !set(record, s_content, Py_None) || !set(record, s_former, Py_None) ||
            PyDict_SetItem(work->records, take->page_number, record) < 0)
            return 0;
    }
    PyObject *former = get(work, take->record, s_publication);
    if (former == NULL)
        return 0;
    if (former != Py_None) {
        PyObject *pair = PyTuple_Pack(2, former, get(work, take->record, s_tag));
        if (!set_new(take->record, s_former, pair) || !set(take->record, s_publication, Py_None) ||
            !set(take->record, s_promise, Py_None) || !set(take->record, s_content, Py_None))
            return 0;
    }
    PyObject *holders = get(work, take->record, s_holders);
    return set(take->record, s_tag, tag) && set(take->record, s_owner, request) && holders != NULL &&
           PySet_Add(holders, request) == 0 && set(take->record, s_was_used, Py_True) &&
           set(take->record, s_reset_free, Py_False) &&
           note(&work->recorder, take->page_number, s_allocated, tag, request);
}

/* `Ledger.extend_run`. */
static int extend(Work *work, Taken *take, PyObject *tag_number, int64_t tag)
{
    PyObject *key = get(work, take->ledger, s__key);
    uint64_t secret = key == NULL ? 0 : PyLong_AsUnsignedLongLong(key);
    if (PyErr_Occurred())
        return 0;
    take->digest += mix(secret, (uint64_t)(take->stop - 1), (uint64_t)tag);
    return PyList_Append(take->pages, take->page_number) == 0 && PyList_Append(take->tags, tag_number) == 0 &&
           put(take->extent, 1, take->stop) &&
           set_new(take->ledger, s__digest, PyLong_FromUnsignedLongLong(take->digest)) &&
           set_new(take->ledger, s__summed, PyLong_FromLongLong(take->stop));
}

/* The pages into page table, ledgers and row array; `packed` becomes the body with these rows, then the changes. */
static int take_all(Work *work, PyObject *page_record, int64_t *packed, int64_t words, int64_t head, int64_t *cells,
                    int64_t stride)
{
    PyObject *counter = get(work, work->table, s__tags), *columns = get(work, work->batch, s_columns);
    PyObject *floors = get(work, work->batch, s_floors);
    int64_t rows = PyList_Size(work->states), tag, longest, count = work->takes;
    if (floors == NULL || !whole_of(counter, s__next, &tag) || !list_of(columns, 1) ||
        !small(PyList_GetItem(columns, 0), &longest))
        return 0;
    int64_t before = longest;
    for (int64_t i = 0; i < count; i++, tag++) {
        Taken *take = &work->taken[i];
        PyObject *tag_number = own(work, PyLong_FromLongLong(tag));
        if (tag_number == NULL || !set_new(counter, s__next, PyLong_FromLongLong(tag + 1)) ||
            !hand_out(work, take, tag_number, page_record) || !extend(work, take, tag_number, tag))
            return 0;
        int64_t capacity = take->stop * work->size, *row = packed + head + take->row;
        if (!set_new(take->state, s_capacity, PyLong_FromLongLong(capacity)) ||
            !set_new(take->state, s_floor, PyLong_FromLongLong(take->floor)))
            return 0;
        cells[take->slot] = row[DIGEST * rows] = (int64_t)take->digest;
        cells[take->slot + STOP * stride] = row[STOP * rows] = take->stop;
        cells[take->slot + (FIELDS + FLOOR) * stride] = row[(FIELDS + FLOOR) * rows] = take->floor;
        packed[words + i] = take->page;
        packed[words + count + i] = tag;
        packed[words + 2 * count + i] = take->writer + take->stop - 1;
        longest = take->stop > longest ? take->stop : longest;
        if (work->capacities != Py_None && !put(work->capacities, take->row, capacity))
            return 0;
        if (floors != Py_None && !put(floors, take->row, take->floor))
            return 0;
    }
    if (longest == before)
        return 1;
    /* Another list: sections are kept for the one that they were made for. */
    PyObject *number = own(work, PyLong_FromLongLong(longest));
    PyObject *list = number == NULL ? NULL : PyList_New(0);
    int done = list != NULL && PyList_Append(list, number) == 0 && set(work->batch, s_columns, list);
    Py_XDECREF(list);
    return done;
}

/* `PageTable.publish`, and the promise to the step that keeps it. */
static int publish(Work *work, Publication *one, PyObject *content, PyObject *pending, PyObject *promise_type)
{
    PyObject *request = get(work, one->state, s_id), *promise = Py_None, *what = s_published;
    if (!one->complete) {
        PyObject *pool = get(work, get(work, work->table, s_spec), s_name);
        PyObject *step = one->kept_by != NULL ? one->kept_by : pending, *promises = get(work, step, s_promises);
        PyObject *row = one->kept_row != NULL ? Py_NewRef(one->kept_row) : PyLong_FromLongLong(one->row);
        promise = bare(&work->references, promise_type);
        if (own(work, row) == NULL || !list_of(promises, -1) || !set(promise, s_pool, pool) ||
            !set(promise, s_page, one->page_number) || !set(promise, s_tag, one->tag) ||
            !set(promise, s_writer, one->state) || !set_new(promise, s_need_tokens, PyLong_FromLongLong(one->need)) ||
            !set(promise, s_step, get(work, step, s_step)) || !set_new(promise, s_dependents, PyList_New(0)) ||
            !set(promise, s_kept, Py_None))
            return 0;
        PyObject *pair = PyTuple_Pack(2, row, promise);
        int done = pair != NULL && PyList_Append(promises, pair) == 0;
        Py_XDECREF(pair);
        if (!done)
            return 0;
        what = s_promised;
    }
    return request != NULL && set(one->record, s_publication, one->key) && set(one->record, s_promise, promise) &&
           set(one->record, s_content, content) && note(&work->recorder, one->page_number, what, one->tag, request);
}

/* -- the call ------------------------------------------------------------------------------------------------------ */

static int look_at_all(Work *work, PyObject *grown, PyObject *published)
{
    if (!list_of(grown, -1) || !list_of(published, -1) || PyList_Size(grown) > MOST || PyList_Size(published) > MOST)
        return 0;
    if (!survey(work))
        return 0;
    for (Py_ssize_t i = 0; i < PyList_Size(grown); i++)
        if (!look_at_taken(work, PyList_GetItem(grown, i)))
            return 0;
    for (Py_ssize_t i = 0; i < PyList_Size(published); i++)
        if (!look_at_publication(work, PyList_GetItem(published, i)))
            return 0;
    return 1;
}

/* The arrays of a step that takes pages. */
typedef struct {
    Py_buffer packed, body, cells;
    int held;
    int64_t head;
} Arrays;

static void release(Arrays *arrays)
{
    Py_buffer *all[] = {&arrays->packed, &arrays->body, &arrays->cells};
    while (arrays->held)
        PyBuffer_Release(all[--arrays->held]);
}

/* Whether everything that will be written to is there. */
static int reach(Work *work, Arrays *arrays, PyObject *packed, PyObject *body)
{
    PyObject *cells = get(work, get(work, work->books, s_rows), s_table);
    PyObject *head = get(work, work->batch, s_head);
    Py_ssize_t head_words = head == NULL ? -1 : PyObject_Length(head);
    if (cells == NULL || head_words < 0 || PyObject_GetBuffer(packed, &arrays->packed, PyBUF_WRITABLE) < 0)
        return 0;
    arrays->held = 1;
    if (PyObject_GetBuffer(body, &arrays->body, PyBUF_SIMPLE) < 0)
        return 0;
    arrays->held = 2;
    if (PyObject_GetBuffer(cells, &arrays->cells, PyBUF_WRITABLE | PyBUF_ND) < 0)
        return 0;
    arrays->held = 3;
    arrays->head = head_words;
    int64_t rows = PyList_Size(work->states), fields = FIELDS + OF_REQUEST;
    if (arrays->packed.len != arrays->body.len + 24 * work->takes ||
        arrays->body.len != 8 * (head_words + fields * rows) || arrays->cells.ndim != 2 ||
        arrays->cells.itemsize != 8 || arrays->cells.shape[0] != fields)
        return 0;
    for (Py_ssize_t i = 0; i < work->takes; i++)
        if (work->taken[i].slot >= arrays->cells.shape[1])
            return 0;
    return 1;
}

PyDoc_STRVAR(advance_doc,
             "advance(books, table, batch, again, grown, published, contents, size, further, pending, packed, "
             "page_record, promise)\n--\n\n"
             "Pages and publications of a step into the books. True if that was done; NotImplemented, with nothing "
             "changed, where it is not the usual case.\n\n"
             "contents: what each page that is published holds, or None. packed: int64, the body of the batch with "
             "three words more for each page taken, which is filled; None where none is. pending: the step, built as "
             "it will be. page_record, promise: the types.");

static PyObject *advance(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 13) {
        PyErr_SetString(PyExc_TypeError, "advance takes 13 arguments");
        return NULL;
    }
    Work work;
    Arrays arrays = {.held = 0};
    PyObject *contents = args[6], *pending = args[9], *packed = args[10], *rooms = NULL, *room = NULL, *body;
    work.books = args[0], work.table = args[1], work.batch = args[2], work.again = args[3];
    work.takes = work.publishes = work.references.count = 0;
    int usual = small(args[7], &work.size) && work.size > 0 && small(args[8], &work.further) &&
                small_of(work.again, s_further, &work.before) && look_at_all(&work, args[4], args[5]) &&
                list_of(contents, work.publishes) &&
                (rooms = own(&work, rooms_then(&work, &room))) != NULL;
    if (usual && work.takes)
        usual = (body = get(&work, work.batch, s_body)) != NULL && reach(&work, &arrays, packed, body);
    int done = usual;
    if (usual) {
        if (work.takes) {
            memcpy(arrays.packed.buf, arrays.body.buf, (size_t)arrays.body.len);
            done = take_all(&work, args[11], arrays.packed.buf, arrays.body.len / 8, arrays.head, arrays.cells.buf,
                            arrays.cells.shape[1]);
        }
        for (Py_ssize_t i = 0; done && i < work.publishes; i++)
            done = publish(&work, &work.published[i], PyList_GetItem(contents, i), pending, args[12]);
        done = done && set(work.again, s_rooms, rooms) && set(work.again, s_room, room) &&
               set_new(work.again, s_further, PyLong_FromLongLong(work.further));
        if (!done && !PyErr_Occurred())
            PyErr_SetString(PyExc_SystemError, "kvguard._onward: the books are not what they were a moment ago");
    }
    release(&arrays);
    Py_XDECREF(room);
    let_go(&work.references);
    if (usual)
        return done ? Py_NewRef(Py_True) : NULL;
    /* Whatever stood in the way, the Python way meets it, too. */
    PyErr_Clear();
    return Py_NewRef(Py_NotImplemented);
}

static PyMethodDef methods[] = {
    {"advance", (PyCFunction)(void (*)(void))advance, METH_FASTCALL, advance_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_onward", "The usual case of kvguard.onward, in C.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__onward(void)
{
    return intern_names() ? with_interface(PyModule_Create(&definition)) : NULL;
}
