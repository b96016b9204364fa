/* What kvguard/_onward.c looks at before it changes anything: a step's rows, the pages they take and those they publish.

   Each function answers 1 for the usual case and 0 for anything else, an exception included. */

#ifndef KVGUARD_ONWARD_LOOK_H
#define KVGUARD_ONWARD_LOOK_H

#include "_onward.h"

#define UNBOUNDED ((int64_t)1 << 62)

/* As in kvguard/requests.py. */
enum { DIGEST = 0, STOP = 2, FIELDS = 3, FLOOR = 1, OF_REQUEST = 2 };

/* A page that a row goes on to. References are borrowed from `Work.references` or from the lists that were given. */
typedef struct {
    int64_t row, page, floor, room, stop, slot, writer;
    uint64_t digest;
    PyObject *page_number, *record, *state, *ledger, *pages, *tags, *extent;
} Taken;

/* A page that is published: already complete, or promised by the row `kept_row` of the step `kept_by`. */
typedef struct {
    int64_t row, page, need;
    int complete;
    PyObject *page_number, *tag, *record, *state, *key, *kept_by, *kept_row;
} Publication;

/* One call: what it was given, what it found, and the references it holds until it ends. */
typedef struct {
    PyObject *books, *table, *batch, *again, *records;
    PyObject *states, *ends, *capacities, *rooms;
    int64_t size, num_pages, null_page, before, further;
    int floors_known;
    Taken taken[MOST];
    Publication published[MOST];
    Py_ssize_t takes, publishes;
    Recorder recorder;
    References references;
} Work;

static PyObject *own(Work *work, PyObject *found)
{
    return keep(&work->references, found);
}

static PyObject *get(Work *work, PyObject *owner, PyObject *name)
{
    return look(&work->references, owner, name);
}

/* What all rows have in common. */
static int survey(Work *work)
{
    PyObject *spec = get(work, work->table, s_spec), *null_page = get(work, spec, s_null_page);
    work->records = get(work, work->table, s__records);
    work->states = get(work, work->batch, s_states);
    work->ends = get(work, work->again, s_ends);
    work->capacities = get(work, work->batch, s_capacities);
    work->rooms = get(work, work->again, s_rooms);
    PyObject *floors_known = get(work, work->again, s_floors_known);
    work->null_page = -1;
    if (floors_known == NULL || !small_of(spec, s_num_pages, &work->num_pages))
        return 0;
    if (null_page != Py_None && !small(null_page, &work->null_page))
        return 0;
    if (!list_of(work->states, -1) || work->records == NULL || !PyDict_CheckExact(work->records))
        return 0;
    Py_ssize_t rows = PyList_Size(work->states);
    if (work->ends == NULL || !PyTuple_CheckExact(work->ends) || PyTuple_Size(work->ends) != rows)
        return 0;
    if (!list_of(work->rooms, rows) || (work->capacities != Py_None && !list_of(work->capacities, rows)))
        return 0;
    work->floors_known = floors_known == Py_True;
    return rows <= LARGEST && find_recorder(&work->references, work->table, &work->recorder);
}

/* The state, the only ledger and its lists of pages and tags of one row. */
static int look_at_row(Work *work, int64_t row, PyObject **state, PyObject **ledger, PyObject **pages, PyObject **tags)
{
    if (row >= PyList_Size(work->states))
        return 0;
    *state = PyList_GetItem(work->states, (Py_ssize_t)row);
    PyObject *ledgers = get(work, *state, s_ledgers);
    if (ledgers == NULL || !PyTuple_CheckExact(ledgers) || PyTuple_Size(ledgers) != 1)
        return 0;
    *ledger = PyTuple_GetItem(ledgers, 0);
    *pages = get(work, *ledger, s__pages);
    *tags = get(work, *ledger, s__tags);
    return list_of(*pages, -1) && list_of(*tags, PyList_Size(*pages)) && PyList_Size(*pages) <= LARGEST;
}

/* The record of a page, borrowed; NULL where there is none. */
static PyObject *record_of(Work *work, PyObject *page)
{
    PyObject *record = PyDict_GetItemWithError(work->records, page);
    return record == NULL ? NULL : own(work, Py_NewRef(record));
}

static int look_at_taken(Work *work, PyObject *grown)
{
    Taken *take = &work->taken[work->takes];
    int64_t end, summed, last;
    if (!PyTuple_CheckExact(grown) || PyTuple_Size(grown) != 2)
        return 0;
    take->page_number = PyTuple_GetItem(grown, 1);
    if (!small(PyTuple_GetItem(grown, 0), &take->row) || !small(take->page_number, &take->page))
        return 0;
    if (take->page >= work->num_pages || take->page == work->null_page)
        return 0;
    for (Py_ssize_t other = 0; other < work->takes; other++)
        if (work->taken[other].row == take->row || work->taken[other].page == take->page)
            return 0;
    take->record = record_of(work, take->page_number);
    if (take->record != NULL) {
        PyObject *holders = get(work, take->record, s_holders);
        if (holders == NULL || PySet_Size(holders) != 0 || !is(take->record, s_promise, Py_None))
            return 0;
    }
    if (PyErr_Occurred() || !look_at_row(work, take->row, &take->state, &take->ledger, &take->pages, &take->tags))
        return 0;
    PyObject *extents = get(work, take->ledger, s__extents);
    Py_ssize_t columns = PyList_Size(take->pages);
    if (!list_of(extents, 1) || !list_of(take->extent = PyList_GetItem(extents, 0), 2))
        return 0;
    if (!small(PyList_GetItem(take->extent, 1), &last) || last != columns)
        return 0;
    /* Terms that were not summed yet are Python's business. */
    if (!small_of(take->ledger, s__summed, &summed) || summed != columns)
        return 0;
    PyObject *digest = get(work, take->ledger, s__digest);
    take->digest = digest == NULL ? 0 : PyLong_AsUnsignedLongLong(digest);
    if (PyErr_Occurred() || !small(PyTuple_GetItem(work->ends, (Py_ssize_t)take->row), &end))
        return 0;
    if (!small_of(take->state, s_floor, &take->floor) || !small_of(take->state, s_slot, &take->slot) ||
        !whole_of(take->state, s_writer, &take->writer))
        return 0;
    take->stop = columns + 1;
    take->room = UNBOUNDED;
    if (work->capacities != Py_None)
        take->room = take->stop * work->size - end;
    if (work->floors_known) {
        /* It starts to write where the last step ended. */
        int64_t start = end + work->before, room;
        take->floor = start - start % work->size;
        room = take->floor + work->size - end;
        take->room = room < take->room ? room : take->room;
    }
    work->takes++;
    return 1;
}

/* A page that an earlier step has filled, or will have: complete, or a promise of that step. */
static int look_for_keeper(Work *work, Publication *one)
{
    int64_t computed = 0;
    PyObject *written = PyObject_CallMethodObjArgs(work->books, s_write_progress, NULL);
    Py_XDECREF(written);
    if (written == NULL || !small_of(one->state, s_computed, &computed))
        return 0;
    if (one->need <= computed)
        return one->complete = 1;
    PyObject *need = own(work, PyLong_FromLongLong(one->need));
    if (need == NULL)
        return 0;
    PyObject *keeper = own(work, PyObject_CallMethodObjArgs(work->books, s_writing_step, one->state, need, NULL));
    if (keeper == NULL || !PyTuple_CheckExact(keeper) || PyTuple_Size(keeper) != 2)
        return 0;
    one->kept_by = PyTuple_GetItem(keeper, 0);
    one->kept_row = PyTuple_GetItem(keeper, 1);
    return 1;
}

static int look_at_publication(Work *work, PyObject *published)
{
    Publication *one = &work->published[work->publishes];
    PyObject *ledger, *pages, *tags;
    int64_t column, tag, found, end;
    if (!PyTuple_CheckExact(published) || PyTuple_Size(published) != 3)
        return 0;
    one->kept_by = one->kept_row = NULL;
    one->complete = 0;
    one->key = PyTuple_GetItem(published, 2);
    if (!small(PyTuple_GetItem(published, 0), &one->row) || !small(PyTuple_GetItem(published, 1), &column))
        return 0;
    if (!look_at_row(work, one->row, &one->state, &ledger, &pages, &tags) || column >= PyList_Size(pages))
        return 0;
    one->page_number = PyList_GetItem(pages, (Py_ssize_t)column);
    one->tag = PyList_GetItem(tags, (Py_ssize_t)column);
    if (!small(one->page_number, &one->page) || one->page >= work->num_pages || one->page == work->null_page)
        return 0;
    for (Py_ssize_t other = 0; other < work->publishes; other++)
        if (work->published[other].page == one->page)
            return 0;
    one->record = record_of(work, one->page_number);
    if (one->record == NULL || !whole(one->tag, &tag) || tag == 0)
        return 0;
    if (!whole_of(one->record, s_tag, &found) || found != tag)
        return 0;
    if (!is(one->record, s_publication, Py_None) || !is(one->record, s_promise, Py_None) ||
        !is(one->state, s_stalled, Py_False))
        return 0;
    one->need = (column + 1) * work->size;
    if (!small(PyTuple_GetItem(work->ends, (Py_ssize_t)one->row), &end) || one->need > end + work->further)
        return 0;
    if (one->need <= end + work->before && !look_for_keeper(work, one))
        return 0;
    work->publishes++;
    return 1;
}

/* How far each row can go on with what it takes: a new list, and the least of it. */
static PyObject *rooms_then(Work *work, PyObject **least)
{
    Py_ssize_t rows = PyList_Size(work->rooms);
    PyObject *rooms = PyList_GetSlice(work->rooms, 0, rows);
    /* A step without rows cannot go on. */
    int64_t lowest = rows ? UNBOUNDED : 0, room;
    for (Py_ssize_t i = 0; rooms != NULL && i < work->takes; i++) {
        PyObject *value = PyLong_FromLongLong(work->taken[i].room);
        if (value == NULL || PyList_SetItem(rooms, (Py_ssize_t)work->taken[i].row, value) < 0)
            Py_CLEAR(rooms);
    }
    for (Py_ssize_t row = 0; rooms != NULL && row < rows; row++) {
        if (!whole(PyList_GetItem(rooms, row), &room))
            Py_CLEAR(rooms);
        else if (room < lowest)
            lowest = room;
    }
    if (rooms == NULL || work->further > lowest || (*least = PyLong_FromLongLong(lowest)) == NULL) {
        Py_XDECREF(rooms);
        return NULL;
    }
    return rooms;
}

#endif
