/* Small loops of a step, in C: which requests go on to another page, tags of a mirror, promises that were kept. */

#include "_onward.h"

PyDoc_STRVAR(grown_by_one_doc,
             "grown_by_one(names, lists, counts)\n--\n\n"
             "(place, last element) for each of `names` whose list in the dictionary `lists` is one longer than `counts` "
             "says at that place; None where one has changed in another way.");

static PyObject *grown_by_one(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 3 || !list_of(args[0], -1) || !PyDict_Check(args[1]) || !list_of(args[2], PyList_Size(args[0]))) {
        PyErr_SetString(PyExc_TypeError, "grown_by_one takes a list, a dictionary and a list of the same length");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t place = 0; found != NULL && place < PyList_Size(args[0]); place++) {
        PyObject *list = PyDict_GetItemWithError(args[1], PyList_GetItem(args[0], place));
        int64_t known;
        if (!list_of(list, -1) || !small(PyList_GetItem(args[2], place), &known)) {
            Py_CLEAR(found);
            break;
        }
        Py_ssize_t length = PyList_Size(list);
        if (length == known)
            continue;
        PyObject *grown = length == known + 1 ? Py_BuildValue("(nO)", place, PyList_GetItem(list, length - 1)) : NULL;
        if (grown == NULL || PyList_Append(found, grown) < 0)
            Py_CLEAR(found);
        Py_XDECREF(grown);
    }
    if (found == NULL && !PyErr_Occurred())
        return Py_NewRef(Py_None);
    return found;
}

PyDoc_STRVAR(keep_promises_doc,
             "keep_promises(table, promises)\n--\n\n"
             "`Books.settle` as kept of promises of one pool, (row, promise) each, up to the first that is settled "
             "already or whose writer has stalled; answers how many that were.");

static PyObject *keep_promises(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || !list_of(args[1], -1)) {
        PyErr_SetString(PyExc_TypeError, "keep_promises takes a page table and a list");
        return NULL;
    }
    References references;
    Recorder recorder;
    references.count = 0;
    Py_ssize_t done = 0, promises = PyList_Size(args[1]);
    PyObject *records = look(&references, args[0], s__records);
    int sound = records != NULL && PyDict_CheckExact(records) && find_recorder(&references, args[0], &recorder);
    /* So few that the references suffice. */
    for (promises = promises > MOST ? MOST : promises; sound && done < promises; done++) {
        PyObject *pair = PyList_GetItem(args[1], done);
        PyObject *promise = PyTuple_CheckExact(pair) && PyTuple_Size(pair) == 2 ? PyTuple_GetItem(pair, 1) : NULL;
        PyObject *writer = look(&references, promise, s_writer), *page = look(&references, promise, s_page);
        if (page == NULL || !is(promise, s_kept, Py_None) || !is(writer, s_stalled, Py_False))
            break;
        PyObject *record = PyDict_GetItemWithError(records, page);
        if (record == NULL)
            break;
        sound = set(promise, s_kept, Py_True);
        if (sound && is(record, s_promise, promise)) {
            PyObject *tag = look(&references, record, s_tag), *name = look(&references, writer, s_id);
            sound = tag != NULL && name != NULL && set(record, s_promise, Py_None) &&
                    note(&recorder, page, s_complete, tag, name);
        }
    }
    let_go(&references);
    return sound && !PyErr_Occurred() ? PyLong_FromSsize_t(done) : NULL;
}

/* The changes that `packed` lists from these places on; a page outside of the mirrors is passed over. */
static int change(const Py_buffer *packed, const Py_buffer *tags, const Py_buffer *writers, int64_t pages, int64_t values,
                  int64_t words, int64_t changes)
{
    const int64_t *from = packed->buf, length = packed->len / 8, all = tags->len / 8;
    if (pages + changes > length || values + changes > length || words + changes > length ||
        (writers != NULL && writers->len != tags->len)) {
        PyErr_SetString(PyExc_ValueError, "the changes are not where they are said to be");
        return 0;
    }
    for (int64_t i = 0; i < changes; i++) {
        int64_t page = from[pages + i];
        if (page < 0 || page >= all)
            continue;
        ((int64_t *)tags->buf)[page] = from[values + i];
        if (writers != NULL)
            ((int64_t *)writers->buf)[page] = from[words + i];
    }
    return 1;
}

/* The memory of `count` arrays, int64 and contiguous, `writable` of them to be written to; how many could be had. */
static int memory(PyObject *const *arrays, int count, int writable, Py_buffer *into)
{
    for (int i = 0; i < count; i++)
        if (PyObject_GetBuffer(arrays[i], &into[i], i < writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            return i;
    return count;
}

PyDoc_STRVAR(change_tags_doc,
             "change_tags(tags, writers, packed, pages, values, words, changes)\n--\n\n"
             "The changes that `packed` lists: the page of each at `pages`, its tag at `values`, its writer at `words`. "
             "`tags`, `writers`: the mirrors int64 [pages]; writers may be None. A page outside is passed over.");

static PyObject *change_tags(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer views[3];
    int64_t at[4];
    if (count != 7 || !small(args[3], &at[0]) || !small(args[4], &at[1]) || !small(args[5], &at[2]) ||
        !small(args[6], &at[3])) {
        PyErr_SetString(PyExc_TypeError, "change_tags takes three arrays and four numbers");
        return NULL;
    }
    PyObject *arrays[] = {args[0], args[1] == Py_None ? args[0] : args[1], args[2]};
    int held = memory(arrays, 3, 2, views);
    int done = held == 3 && change(&views[2], &views[0], args[1] == Py_None ? NULL : &views[1], at[0], at[1], at[2], at[3]);
    while (held)
        PyBuffer_Release(&views[--held]);
    return done ? Py_NewRef(Py_None) : NULL;
}

PyDoc_STRVAR(renew_doc,
             "renew(host, tags, writers, rows, row_start, packed, pages, values, words, changes)\n--\n\n"
             "Another step of the same rows: `packed` to the beginning of `host`, `rows` to `row_start` of it, and "
             "`change_tags`. False, with nothing done, where `host` is too small.");

static PyObject *renew(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer views[5];
    int64_t row_start, at[4];
    if (count != 10 || !small(args[4], &row_start) || !small(args[6], &at[0]) || !small(args[7], &at[1]) ||
        !small(args[8], &at[2]) || !small(args[9], &at[3])) {
        PyErr_SetString(PyExc_TypeError, "renew takes five arrays and five numbers");
        return NULL;
    }
    PyObject *arrays[] = {args[0], args[1], args[2] == Py_None ? args[1] : args[2], args[3], args[5]};
    int held = memory(arrays, 5, 3, views), fits = 0, done = 0;
    const Py_buffer *host = &views[0], *rows = &views[3], *packed = &views[4];
    if (held == 5) {
        fits = packed->len <= host->len && row_start * 8 + rows->len <= packed->len;
        if (fits && change(packed, &views[1], args[2] == Py_None ? NULL : &views[2], at[0], at[1], at[2], at[3])) {
            memcpy(host->buf, packed->buf, (size_t)packed->len);
            memcpy((char *)host->buf + row_start * 8, rows->buf, (size_t)rows->len);
            done = 1;
        }
    }
    while (held)
        PyBuffer_Release(&views[--held]);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

static PyMethodDef methods[] = {
    {"grown_by_one", (PyCFunction)(void (*)(void))grown_by_one, METH_FASTCALL, grown_by_one_doc},
    {"keep_promises", (PyCFunction)(void (*)(void))keep_promises, METH_FASTCALL, keep_promises_doc},
    {"change_tags", (PyCFunction)(void (*)(void))change_tags, METH_FASTCALL, change_tags_doc},
    {"renew", (PyCFunction)(void (*)(void))renew, METH_FASTCALL, renew_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_steps", "Small loops of a step.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__steps(void)
{
    return intern_names() ? with_interface(PyModule_Create(&definition)) : NULL;
}
