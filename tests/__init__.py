"""A package, so that `from tests.processes import run_processes` works here and in the children."""
