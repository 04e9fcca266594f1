"""Optimizers of a run: their parameter groups, LARS, and the learning rate of each step.

`parameter_groups` makes the groups of a model, `optimizers` has the kinds that a recipe names
(OPTIMIZERS), `lars` the one that torch does not have, and `step` is what each step of a run does.
"""
