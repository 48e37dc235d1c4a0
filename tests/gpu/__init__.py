"""`make gpu-check`: tests on the arrays of a GPU, with a report. On a machine without a GPU they test host arrays."""
