"""What the plans of all kinds of runs share, before the first step.

`recipe_plan` has the methods that they share, `rules` refuse and remark, `memory` estimates what a
step holds, `pictures` draws views and neighbours, `watch` judges what is held out.

A run that executes a plan reaches none of it; see `sslpipe.run.contract`.
"""
