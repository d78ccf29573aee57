/* Cache hints for torch's tensors, whose bodies nothing but this file looks at: a stale
 * or wrong address given to a prefetch costs time, never a fault. */
#include "producers.h"
#include "tensor.h"

enum {
    LINE = 64,
    BODY = 512,     /* bytes, at most, from a body's start to the shape inside it */
    BODY_LINES = 4, /* a TensorImpl has about 200 bytes */
    FIRST_PART = 2, /* words of a body that point at its storage, autograd metadata */
    METADATA = 3,
    LAST_LARGE = 3, /* (these two are read in their first and second line) and */
    LAST_PART = 6,  /* version counter; the two before are the vtable and the count */
    FIRST_WORD = 2, /* of a Python object, after its count and type */
    LAST_WORD = 5
};

int
py_find_body_word(PyObject *object, const py_array *view)
{
    const uintptr_t *words = (const uintptr_t *)object;
    const uintptr_t shape = (uintptr_t)view->shape;
    PyObject *size =
        PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__basicsize__");
    const long bytes = size == NULL ? 0 : PyLong_AsLong(size);
    int found = 0;

    Py_XDECREF(size);
    PyErr_Clear();
    for (int w = FIRST_WORD; w <= LAST_WORD && found == 0; w++) {
        if (bytes >= (long)((w + 1) * (int)sizeof *words) && words[w] != 0 &&
            words[w] < shape && shape - words[w] < BODY &&
            shape - words[w] >= (LAST_PART + 1) * sizeof *words) {
            found = w;
        }
    }
    return found;
}

/* The tensor's body, or NULL. */
static void *const *
body_of(const py_state *state, PyObject *object)
{
    for (int i = 0; i < state->n_fast; i++) {
        if (state->fast[i].type == Py_TYPE(object)) {
            const int word = state->fast[i].body_word;
            return word == 0 ? NULL : ((void *const *const *)object)[word];
        }
    }
    return NULL;
}

void
py_hint_body(const py_state *state, PyObject *object)
{
    const uintptr_t body = (uintptr_t)body_of(state, object);

    for (uintptr_t i = 0; body != 0 && i < BODY_LINES; i++) {
        __builtin_prefetch((const void *)(body + i * LINE));
    }
}

void
py_hint_parts(const py_state *state, PyObject *object)
{
    void *const *body = body_of(state, object);

    for (int i = FIRST_PART; body != NULL && i <= LAST_PART; i++) {
        if (body[i] != NULL) { /* an unmapped page is walked for every time */
            __builtin_prefetch(body[i]);
            if (i <= LAST_LARGE) {
                __builtin_prefetch((const char *)body[i] + LINE);
            }
        }
    }
}

void
py_hint_tensors(const py_state *state, PyObject *const *objects, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        void *const *body = body_of(state, objects[i]);

        if (body != NULL) {
            (void)*(void *const volatile *)body;
        }
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        void *const *body = body_of(state, objects[i]);

        py_hint_body(state, objects[i]);
        for (int w = FIRST_PART; body != NULL && w <= LAST_PART; w++) {
            if (w != METADATA && body[w] != NULL) {
                __builtin_prefetch(body[w]);
            }
        }
    }
}
