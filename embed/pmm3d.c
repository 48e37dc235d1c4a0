/* The public functions. Each checks what can be checked without Python, and passes its arguments as integers. */
#define _GNU_SOURCE
#include "pmm3d.h"

#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "calls.h"
#include "embedded.h"

enum { TEXT = 20480 };
/* Types of numbers and arrays, which only Fortran knows, and the number from which boxes count. */
enum { OF_ALPHA = 0, OF_BETA = 0, OF_A = 0, OF_B = 0, OF_C = 0, OF_BLOCK = 0, BASE = 0 };
static const int64_t NO_INTEGER = -INT64_MAX; /* Fortran passes it for what is no integer of 4 or 8 bytes */

/* users: calls of pmm3d_start less those of pmm3d_finalize. */
static struct {
    atomic_flag busy;
    int started;
    atomic_int users;
    pmm3d_python_call_type *call;
    pmm3d_python_runs_type *runs;
} state = {ATOMIC_FLAG_INIT, 0, 0, NULL, NULL};

/* The last error of each thread. */
static _Thread_local struct {
    int everywhere;
    char text[TEXT];
} last;

static int leave(int code) {
    atomic_flag_clear(&state.busy);
    return code;
}

static int failed(int code, const char *text) {
    snprintf(last.text, TEXT, "%s", text);
    last.everywhere = 0;
    return code;
}

/* Load a library from the folder of this library. */
static void *beside(const char *name) {
    char path[PATH_MAX], full[PATH_MAX + 64];
    Dl_info here;
    if (!dladdr((void *)&beside, &here) || !realpath(here.dli_fname, path)) return NULL;
    snprintf(full, sizeof full, "%s/%s", dirname(path), name);
    /* Symbols must be global, because Python's extension modules use them. */
    return dlopen(full, RTLD_NOW | RTLD_GLOBAL);
}

static int end(int everything);

static int at_end_of_mpi(MPI_Comm comm, int key, void *value, void *extra) {
    int code = PMM3D_OK;
    (void)comm, (void)key, (void)value, (void)extra;
    if (!state.runs()) return MPI_SUCCESS;
    /* Other ranks may still be in another call. It fails on all ranks, and then they come here too. */
    for (int told = 0; (code = end(1)) == PMM3D_ERROR_DISAGREEMENT && last.everywhere; told = 1)
        if (!told) fprintf(stderr, "pmm3d: MPI_Finalize frees all objects, again after an error: %s\n", last.text);
    if (code) fprintf(stderr, "pmm3d: MPI_Finalize cannot free all objects: %s\n", last.text);
    return MPI_SUCCESS;
}

/* MPI_Finalize first deletes the attributes of MPI_COMM_SELF. */
static void finalize_with_mpi(void) {
    int key;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_end_of_mpi, &key, NULL);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
    MPI_Comm_free_keyval(&key);
}

static int load(void) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING], text[TEXT] = "";
    const char *asked = getenv("PMM3D_PYTHON");
    int length;
    Dl_info mpi = {0};
    if (!state.call) {
        void *python = beside("libpmm3d_python.so");
        if (!python) {
            snprintf(text, TEXT, "the part with Python cannot be loaded: %s. Install it again: make embed or make "
                     "install", dlerror());
            return failed(PMM3D_ERROR_PYTHON, text);
        }
        pmm3d_python_start_type *start = (pmm3d_python_start_type *)dlsym(python, "pmm3d_python_start");
        if (start(asked && *asked ? asked : PMM3D_BUILT_WITH, text, TEXT)) return failed(PMM3D_ERROR_PYTHON, text);
        state.runs = (pmm3d_python_runs_type *)dlsym(python, "pmm3d_python_runs");
        state.call = (pmm3d_python_call_type *)dlsym(python, "pmm3d_python_call");
    }
    MPI_Get_library_version(version, &length);
    dladdr((void *)&MPI_Get_library_version, &mpi);
    int64_t arguments[] = {(intptr_t)version, (intptr_t)mpi.dli_fname, MPI_Comm_c2f(MPI_COMM_WORLD)}, results[4];
    int everywhere = 0, code = PMM3D_ERROR_PYTHON, ran;
    MPI_Errhandler of_world, of_self; /* mpi4py replaces them */
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &of_world);
    MPI_Comm_get_errhandler(MPI_COMM_SELF, &of_self);
    ran = state.call("load", arguments, 3, results, &code, &everywhere, text, TEXT);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, of_world);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, of_self);
    MPI_Errhandler_free(&of_world);
    MPI_Errhandler_free(&of_self);
    if (!ran)
        return failed(PMM3D_ERROR_PYTHON, "Python's side of the library could not be started; what Python said is on "
                                          "stderr. Install it again: make embed or make install");
    if (code) return failed(code, text);
    finalize_with_mpi();
    state.started = 1;
    return PMM3D_OK;
}

/* Return PMM3D_OK if this thread may call now. Then other threads are refused until `leave`. */
static int enter(void) {
    int running = 0, over = 0, provided = MPI_THREAD_SINGLE, main_thread = 1;
    if (atomic_flag_test_and_set(&state.busy))
        return failed(PMM3D_ERROR_THREAD, "another thread is in a call: one at a time");
    MPI_Initialized(&running);
    MPI_Finalized(&over);
    if (!running || over)
        return leave(failed(PMM3D_ERROR_MPI, over ? "called after MPI_Finalize" : "called before MPI_Init: start MPI "
                            "first"));
    MPI_Query_thread(&provided);
    MPI_Is_thread_main(&main_thread);
    if (provided < MPI_THREAD_SERIALIZED && !main_thread)
        return leave(failed(PMM3D_ERROR_THREAD, "called by another thread than the one that started MPI, which was "
                            "asked for less than MPI_THREAD_SERIALIZED: call from that thread, or MPI_Init_thread with "
                            "MPI_THREAD_SERIALIZED or more"));
    if (state.started && !state.runs())
        return leave(failed(PMM3D_ERROR_PYTHON, "the program has ended the Python of this process: call pmm3d_finalize "
                            "before Py_Finalize"));
    if (!state.started) {
        int code = load();
        if (code) return leave(code);
    }
    return PMM3D_OK;
}

/* Call a method of the Host, between `enter` and `leave`. */
static int entered(const char *name, int count, const int64_t *arguments, int64_t *results) {
    char text[TEXT] = "";
    int code = PMM3D_ERROR_OTHER, everywhere = 0;
    state.call(name, arguments, count, results, &code, &everywhere, text, TEXT);
    if (code) {
        failed(code, text);
        last.everywhere = everywhere;
    }
    return code;
}

int pmm3d_call(const char *name, const int64_t *arguments, int count, int64_t results[4]) {
    int code = enter();
    return code ? code : leave(entered(name, count, arguments, results));
}

int pmm3d_start(void) {
    int code = enter();
    if (code) return code;
    state.users++;
    return leave(PMM3D_OK);
}

/* Seconds after which a wait for other ranks is logged: PMM3D_TIMEOUT; 0: never. */
static double patience(void) {
    const char *asked = getenv("PMM3D_TIMEOUT");
    char *end = NULL;
    double seconds = asked ? strtod(asked, &end) : 600;
    return asked && (end == asked || seconds < 0) ? 600 : seconds;
}

typedef struct {
    int code, rank;
} Worst;

/* The largest code of all ranks, and the first rank that has it. A late rank does not end the job: ranks 0 and 1 log a
   long wait, as for a Grid. */
static Worst worst_of(int code, MPI_Comm comm) {
    Worst mine = {code, 0}, worst;
    int done = 0;
    double begun = MPI_Wtime(), seconds = patience(), due;
    MPI_Comm_rank(comm, &mine.rank);
    due = mine.rank < 2 ? seconds : 0;
    MPI_Request request;
    MPI_Iallreduce(&mine, &worst, 1, MPI_2INT, MPI_MAXLOC, comm, &request);
    while (MPI_Test(&request, &done, MPI_STATUS_IGNORE), !done) {
        double waited = MPI_Wtime() - begun;
        if (due > 0 && waited > due) {
            due *= 2;
            fprintf(stderr, "pmm3d: rank %d has waited %.0f s for all ranks of the communicator to come to this call. "
                    "The job goes on. Look for a rank that is stopped, has ended, or does something else. The limit is "
                    "%g s: PMM3D_TIMEOUT, 0 for none\n", mine.rank, waited, seconds);
        }
        if (waited > 1e-3) nanosleep(&(struct timespec){0, 100000}, NULL);
    }
    return worst;
}

/* Make the error of one rank the last error of every rank. */
static int share(Worst worst, MPI_Comm comm) {
    char name[MPI_MAX_PROCESSOR_NAME], text[TEXT];
    int length;
    MPI_Get_processor_name(name, &length);
    snprintf(text, TEXT, "rank %d on %s: %.20000s", worst.rank, name, last.text);
    MPI_Bcast(text, TEXT, MPI_CHAR, worst.rank, comm);
    failed(worst.code, text);
    last.everywhere = 1;
    return worst.code;
}

/* Whether all ranks of comm could start: a rank that cannot is not waited for. refused: the error of an argument of
   this rank, or PMM3D_OK. A caller without pmm3d_start becomes a user, except for `lasting`. */
static int start_together(MPI_Comm comm, int refused, int lasting) {
    int code = enter(), running = 0, over = 0, inter = 0;
    if (code == PMM3D_OK) code = leave(refused);
    MPI_Initialized(&running);
    MPI_Finalized(&over);
    if (comm == MPI_COMM_NULL || !running || over || code == PMM3D_ERROR_THREAD) return code;
    MPI_Comm_test_inter(comm, &inter);
    if (inter) return code;
    Worst worst = worst_of(code, comm);
    if (worst.code) return share(worst, comm);
    if (!lasting) atomic_compare_exchange_strong(&state.users, &(int){0}, 1);
    return PMM3D_OK;
}

/* Free all objects, or only count one user less if there are others. */
static int end(int everything) {
    int64_t results[4], arguments[] = {everything};
    int code = enter();
    if (code) return code;
    if (!everything && state.users > 1) {
        state.users--;
        return leave(PMM3D_OK);
    }
    code = entered("finalize", 1, arguments, results);
    if (code == PMM3D_OK) state.users = 0;
    return leave(code);
}

int pmm3d_finalize(void) { return state.users ? end(0) : PMM3D_OK; }

int pmm3d_last_error(char *text, int size) {
    if (text && size > 0) snprintf(text, size, "%s", last.text);
    return (int)strlen(last.text) + 1;
}

int pmm3d_error_everywhere(void) { return last.everywhere; }

int pmm3d_made(int code, const int64_t *results, int *object) {
    if (object) *object = code ? 0 : (int)results[0];
    return code;
}

static int64_t handle(MPI_Comm comm) { return comm == MPI_COMM_NULL ? -1 : MPI_Comm_c2f(comm); }

/* What a Fortran integer names; null for what names nothing. */
static MPI_Comm named(int comm) {
    MPI_Comm found = MPI_Comm_f2c(comm);
    return found ? found : MPI_COMM_NULL;
}

int pmm3d_grid(MPI_Comm comm, int gx, int gy, int gz, int *grid) {
    int64_t results[4];
    int code = start_together(comm, PMM3D_OK, 0);
    return pmm3d_made(code ? code : CALL("grid", results, handle(comm), gx, gy, gz, ADDRESS(grid)), results, grid);
}

int pmm3d_grid_f(int comm, int gx, int gy, int gz, int *grid) { return pmm3d_grid(named(comm), gx, gy, gz, grid); }

int pmm3d_grid_for(MPI_Comm comm, char type, int64_t m, int64_t n, int64_t k, int *grid) {
    int64_t results[4];
    int refused = PMM3D_OK, code;
    if (!type || !strchr("sdczSDCZ", type))
        refused = failed(PMM3D_ERROR_ARGUMENT, "the type is 's', 'd', 'c' or 'z', as in the BLAS");
    if (m == NO_INTEGER || n == NO_INTEGER || k == NO_INTEGER)
        refused = failed(PMM3D_ERROR_ARGUMENT, "sizes are integers of 4 or 8 bytes");
    code = start_together(comm, refused, 0);
    return pmm3d_made(code ? code : CALL("grid_for", results, handle(comm), type, m, n, k, ADDRESS(grid)), results, grid);
}

int pmm3d_grid_for_f(int comm, char type, int64_t m, int64_t n, int64_t k, int *grid) {
    return pmm3d_grid_for(named(comm), type, m, n, k, grid);
}

int pmm3d_grid_shape(int grid, int shape[3]) {
    int64_t results[4];
    int code = CALL("grid_shape", results, grid, ADDRESS(shape));
    for (int axis = 0; !code && axis < 3; axis++) shape[axis] = (int)results[axis];
    return code;
}

int pmm3d_max_workspace(int object, int64_t bytes) {
    int64_t results[4];
    return CALL("max_workspace", results, object, bytes);
}

int pmm3d_library(int object, const char *library) {
    int64_t results[4];
    return CALL("library", results, object, ADDRESS(library));
}

int pmm3d_context_trim(int context) {
    int64_t results[4];
    return CALL("context_trim", results, context);
}

int pmm3d_box(int grid, const char *layout, int64_t rows, int64_t columns, int64_t box[4]) {
    int64_t results[4];
    int code = CALL("box", results, grid, ADDRESS(layout), rows, columns, ADDRESS(box), sizeof *box);
    if (!code) memcpy(box, results, sizeof results);
    return code;
}

int pmm3d_matrix(int grid, char type, int64_t rows, int64_t columns, const char *layout, char order, void *shard,
                 int *matrix) {
    enum { OF_SHARD = 0, ELEMENTS = -1, LEADING = -1 }; /* known in Fortran only */
    int64_t results[4];
    return pmm3d_made(CALL("matrix", results, grid, type, rows, columns, ADDRESS(layout), order, ADDRESS(shard),
                           OF_SHARD, ELEMENTS, LEADING, ADDRESS(matrix)), results, matrix);
}

static int context_of(MPI_Comm comm, int rows, int columns, char order, int *context, int lasting) {
    int64_t results[4];
    int code = start_together(comm, PMM3D_OK, lasting);
    return pmm3d_made(code ? code : CALL("context", results, handle(comm), rows, columns, order, ADDRESS(context), lasting),
                results, context);
}

int pmm3d_context(MPI_Comm comm, int rows, int columns, char order, int *context) {
    return context_of(comm, rows, columns, order, context, 0);
}

int pmm3d_lasting_context(MPI_Comm comm, int rows, int columns, int *context) {
    return context_of(comm, rows, columns, 'R', context, 1);
}

int pmm3d_context_f(int comm, int rows, int columns, char order, int *context) {
    return pmm3d_context(named(comm), rows, columns, order, context);
}

int pmm3d_run(int plan) {
    int64_t results[4];
    return CALL("run", results, plan);
}

int pmm3d_run_matmul(int plan, const void *alpha, int a, int b, const void *beta, int c) {
    int64_t results[4];
    return CALL("run_matmul", results, plan, ADDRESS(alpha), a, b, ADDRESS(beta), c, OF_ALPHA, OF_BETA);
}

int pmm3d_run_pgemm(int plan, const void *alpha, const void *a, const void *b, const void *beta, void *c) {
    int64_t results[4];
    return CALL("run_pgemm", results, plan, ADDRESS(alpha), ADDRESS(a), ADDRESS(b), ADDRESS(beta), ADDRESS(c), OF_ALPHA,
                OF_BETA, OF_A, OF_B, OF_C);
}

int pmm3d_begin(int plan, int *request) {
    int64_t results[4];
    return pmm3d_made(CALL("begin", results, plan, ADDRESS(request)), results, request);
}

int pmm3d_wait(int *request) {
    int64_t results[4];
    if (request && *request == 0) return PMM3D_OK;
    int code = CALL("wait", results, request ? *request : 0);
    if (request && code != PMM3D_ERROR_THREAD) *request = 0;
    return code;
}

/* The functions pmm3d_NAME and pmm3d_plan_NAME. TYPES: declarations of the arguments. */
#define OPERATION(name, TYPES, ...)                                                                                    \
    int pmm3d_##name(TYPES) {                                                                                          \
        int64_t results[4];                                                                                            \
        return CALL(#name, results, __VA_ARGS__, AT_ONCE);                                                             \
    }                                                                                                                  \
    int pmm3d_plan_##name(TYPES, int *plan) {                                                                          \
        int64_t results[4];                                                                                            \
        return pmm3d_made(CALL("plan_" #name, results, __VA_ARGS__, ADDRESS(plan)), results, plan);                    \
    }

#define MATMUL char transa, char transb, const void *alpha, int a, int b, const void *beta, int c
OPERATION(matmul, MATMUL, transa, transb, ADDRESS(alpha), a, b, ADDRESS(beta), c, OF_ALPHA, OF_BETA)

#define REDISTRIBUTE int source, int target
OPERATION(redistribute, REDISTRIBUTE, source, target)

int pmm3d_cholesky_qr(int a, int q, int r) {
    int64_t results[4];
    return CALL("cholesky_qr", results, a, q, r);
}

#define FROM_BLOCKS const void *block, const int64_t box[4], char order, int matrix
OPERATION(from_blocks, FROM_BLOCKS, ADDRESS(block), ADDRESS(box), order, matrix, OF_BLOCK, BASE)

#define TO_BLOCKS int matrix, void *block, const int64_t box[4], char order
OPERATION(to_blocks, TO_BLOCKS, matrix, ADDRESS(block), ADDRESS(box), order, OF_BLOCK, BASE)

int pmm3d_free(int *object) {
    int64_t results[4];
    int code;
    if (object && *object == 0) return PMM3D_OK;
    code = CALL("free", results, object ? *object : 0, ADDRESS(object));
    if (!code) *object = 0;
    return code;
}
