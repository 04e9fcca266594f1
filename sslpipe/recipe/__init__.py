"""Settings: TOML in, one frozen tree out, for every kind of run.

`reading` takes TOML and overrides, and decides by a recipe's sections which kind it is: a
pretraining, whose settings stand in `pretrain`, or one that a satellite brings. What all kinds
share stands in `sections`; `messages` says what a setting means and what is wrong with one.
"""
