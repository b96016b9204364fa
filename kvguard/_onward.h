/* What kvguard/_onward.c and kvguard/_steps.c need of Python objects: references that last as long as a call, whole
   numbers, attributes. */

#ifndef KVGUARD_ONWARD_H
#define KVGUARD_ONWARD_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include "kernels/interface.h"
#include <stdint.h>
#include <string.h>

/* Rows that take or publish a page in one step; a step with more of them goes the Python way. */
#define MOST 32
/* References that a step of so many rows needs at most, with room. */
#define KEPT (48 * MOST)
/* Pages, rows and lengths are taken up to here, so that sums and products of a few of them stay within 64 bits. */
#define LARGEST ((int64_t)1 << 30)

#define NAMES(X)                                                                                                       \
    X(spec) X(num_pages) X(null_page) X(name) X(_records) X(_tags) X(_next) X(_events) X(_recorder) X(depth) X(step)   \
    X(states) X(ends) X(floors_known) X(capacities) X(floors) X(rooms) X(room) X(further) X(head) X(body) X(columns)   \
    X(ledgers) X(_pages) X(_extents) X(_summed) X(_digest) X(_key) X(floor) X(capacity) X(id) X(slot) X(writer)        \
    X(stalled) X(computed) X(holders) X(promise) X(publication) X(content) X(former) X(tag) X(owner) X(was_used)       \
    X(reset_free) X(rows) X(table) X(write_progress) X(writing_step) X(promises) X(pool) X(page) X(need_tokens)        \
    X(dependents) X(kept) X(promised) X(published) X(allocated) X(complete)

#define DECLARE(name) static PyObject *s_##name;
NAMES(DECLARE)

/* Once, when the module is made; 0 with an exception. */
static inline int intern_names(void)
{
#define INTERN(name)                                                                                                   \
    if ((s_##name = PyUnicode_InternFromString(#name)) == NULL)                                                        \
        return 0;
    NAMES(INTERN)
    return 1;
}

/* A module that says what it was built for; passes NULL on. */
static inline PyObject *with_interface(PyObject *module)
{
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", KVGUARD_INTERFACE) < 0)
        Py_CLEAR(module);
    return module;
}

/* The references that a call holds until it ends. */
typedef struct {
    Py_ssize_t count;
    PyObject *held[KEPT];
} References;

/* Holds a new reference; passes NULL on. */
static inline PyObject *keep(References *references, PyObject *found)
{
    if (found == NULL)
        return NULL;
    if (references->count == KEPT) {
        Py_DECREF(found);
        PyErr_SetString(PyExc_SystemError, "kvguard._onward holds too many references");
        return NULL;
    }
    return references->held[references->count++] = found;
}

static inline void let_go(References *references)
{
    while (references->count)
        Py_DECREF(references->held[--references->count]);
}

static inline PyObject *look(References *references, PyObject *owner, PyObject *name)
{
    return owner == NULL ? NULL : keep(references, PyObject_GetAttr(owner, name));
}

static inline int is(PyObject *owner, PyObject *name, PyObject *what)
{
    PyObject *found = owner == NULL ? NULL : PyObject_GetAttr(owner, name);
    Py_XDECREF(found);
    return found == what;
}

/* A whole number that fits; 0 otherwise, with or without an exception. */
static inline int whole(PyObject *value, int64_t *into)
{
    int overflow = 0;
    if (value == NULL || !PyLong_CheckExact(value))
        return 0;
    *into = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow;
}

static inline int small(PyObject *value, int64_t *into)
{
    return whole(value, into) && *into >= 0 && *into <= LARGEST;
}

static inline int whole_of(PyObject *owner, PyObject *name, int64_t *into)
{
    PyObject *value = owner == NULL ? NULL : PyObject_GetAttr(owner, name);
    int fits = whole(value, into);
    Py_XDECREF(value);
    return fits;
}

static inline int small_of(PyObject *owner, PyObject *name, int64_t *into)
{
    return whole_of(owner, name, into) && *into >= 0 && *into <= LARGEST;
}

static inline int list_of(PyObject *object, Py_ssize_t length)
{
    return object != NULL && PyList_CheckExact(object) && (length < 0 || PyList_Size(object) == length);
}

static inline int set(PyObject *owner, PyObject *name, PyObject *value)
{
    return owner != NULL && value != NULL && PyObject_SetAttr(owner, name, value) == 0;
}

static inline int set_new(PyObject *owner, PyObject *name, PyObject *value)
{
    int done = set(owner, name, value);
    Py_XDECREF(value);
    return done;
}

static inline int put(PyObject *list, int64_t place, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    return number != NULL && PyList_SetItem(list, (Py_ssize_t)place, number) == 0;
}

/* Where a page table notes what happens to its pages. */
typedef struct {
    PyObject *events, *step;
    int64_t depth;
} Recorder;

static inline int find_recorder(References *references, PyObject *table, Recorder *into)
{
    PyObject *recorder = look(references, table, s__recorder);
    into->step = look(references, recorder, s_step);
    into->events = look(references, table, s__events);
    return into->step != NULL && into->events != NULL && PyDict_CheckExact(into->events) &&
           small_of(recorder, s_depth, &into->depth);
}

/* `PageTable._note`. */
static inline int note(Recorder *recorder, PyObject *page, PyObject *what, PyObject *tag, PyObject *request)
{
    if (recorder->depth == 0)
        return 1;
    PyObject *events = PyDict_GetItemWithError(recorder->events, page);
    if (events == NULL) {
        PyObject *made = PyErr_Occurred() ? NULL : PyList_New(0);
        int done = made != NULL && PyDict_SetItem(recorder->events, page, made) == 0;
        Py_XDECREF(made);
        if (!done)
            return 0;
        events = made;
    }
    PyObject *event = PyTuple_Pack(4, recorder->step, what, tag, request);
    int done = event != NULL && PyList_Append(events, event) == 0;
    Py_XDECREF(event);
    if (done && PyList_Size(events) > recorder->depth)
        done = PyList_SetSlice(events, 0, 1, NULL) == 0;
    return done;
}

/* An object of a class with slots, none of which is filled: what its `__init__` would set is up to the caller. */
static inline PyObject *bare(References *references, PyObject *type)
{
    newfunc make = (newfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_new);
    PyObject *none = PyTuple_New(0), *made = none == NULL ? NULL : make((PyTypeObject *)type, none, NULL);
    Py_XDECREF(none);
    return keep(references, made);
}

#endif
