"""One training run, whatever is trained: processes, checkpoints, log, guard, stop, watchdog.

For both kinds of training, and for those who look after runs (`status`, `batch_script`). Start
reading at `opening.py`: `open_run` and `Run` put everything else of this package
together, in the order in which a training uses it.
"""
