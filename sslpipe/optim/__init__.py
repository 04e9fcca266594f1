"""Optimizers of a run: their parameter groups, LARS, and the learning rate of each step.

Start with `build.build_optimizer`; `optimizers` has the kinds that a recipe names (OPTIMIZERS),
`lars` the one that torch does not have, and `step` what each step of a run does.
"""
