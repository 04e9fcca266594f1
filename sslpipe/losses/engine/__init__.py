"""How contrastive losses are computed exactly without the matrix of all pairs.

For whoever changes their speed, memory or precision; objectives are written on `losses/base.py`.
Start with `contrast.py` (one loss over all ranks, and its gradient), continue with `tiles.py` (sums
over pairs, one tile at a time); `anchors.py` says which pairs count. `queue.py` keeps rows of
earlier steps.
"""
