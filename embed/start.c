/* Starts Python. A failure is returned as a text. The caller's locale, signal handlers and streams do not change.
   Python ignores the variables PYTHON* of the environment: they are meant for the Python programs of the job. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int not_started(char *text, int size, const char *executable, const char *why) {
    snprintf(text, size, "Python cannot be started from %s: %s. Name another one in PMM3D_PYTHON, of version %d.%d, "
             "for which the library was built", executable, why ? why : "it gives no reason", PY_MAJOR_VERSION,
             PY_MINOR_VERSION);
    return 1;
}

static PyStatus start(const char *executable) {
    PyPreConfig before;
    PyPreConfig_InitPythonConfig(&before);
    before.configure_locale = before.coerce_c_locale = before.parse_argv = 0;
    before.use_environment = 0;
    before.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&before);
    if (PyStatus_Exception(status)) return status;
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = config.parse_argv = config.configure_c_stdio = config.use_environment = 0;
    status = PyConfig_SetBytesString(&config, &config.executable, executable);
    if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    return status;
}

/* The first import of Python's module signal installs a handler of SIGINT. Import it now, and restore the caller's
   handler, because any package may import it later. */
static void import_signal(void) {
    struct sigaction was;
    sigaction(SIGINT, NULL, &was);
    PyObject *module = PyImport_ImportModule("signal");
    Py_XDECREF(module);
    PyErr_Clear();
    sigaction(SIGINT, &was, NULL);
}

/* Check that _cffi_backend can be imported. Without this check, cffi would print the error and continue. LACKING is the
   text of embedded.py, which build.py defines here. */
static int has_cffi(char *text, int size, const char *executable) {
    PyObject *kind, *error, *trace, *found = PyImport_ImportModule("_cffi_backend");
    if (found) {
        Py_DECREF(found);
        return 1;
    }
    PyErr_Fetch(&kind, &error, &trace);
    PyObject *said = error ? PyObject_Str(error) : NULL;
    const char *why = said ? PyUnicode_AsUTF8(said) : NULL;
    snprintf(text, size, LACKING, executable, why ? why : "cffi");
    Py_XDECREF(said);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    PyErr_Clear();
    return 0;
}

CFFI_DLLEXPORT int pmm3d_python_runs(void) { return Py_IsInitialized(); }

CFFI_DLLEXPORT int pmm3d_python_start(const char *executable, char *text, int size) {
    static int broken = 0;
    if (!Py_IsInitialized()) {
        if (broken) return not_started(text, size, executable, "an earlier attempt failed");
        if (access(executable, X_OK)) return not_started(text, size, executable, strerror(errno));
        PyStatus status = start(executable);
        if (PyStatus_Exception(status)) {
            broken = 1;
            return not_started(text, size, executable, status.err_msg);
        }
        import_signal();
        PyEval_SaveThread();
    }
    PyGILState_STATE held = PyGILState_Ensure();
    int found = has_cffi(text, size, executable);
    PyGILState_Release(held);
    return !found;
}
