"""`make gpu-check`: all that needs a GPU, in one go and with a report. `cases` says what is checked, `jobs` runs it."""
