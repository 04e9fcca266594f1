"""Measure on one GPU what a user asks before a long run; every figure of it can be made again.

`python -m benchmarks.gpu` runs the parts of `__main__`; `wheels` prepares a machine without a
network for it.
"""
