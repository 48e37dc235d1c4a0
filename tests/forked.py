"""Code that runs in a forked child of the test."""

import os
import warnings


def exit_code(child):
    """Call child() in a forked process, which then ends at once. Return its exit code: 0, or 1 after an error."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # a fork while there are threads
        number = os.fork()
    if number == 0:
        code = 1
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def ends_process(*_, **__):
    """Replaces a function that a forked child must not call."""
    os._exit(3)
