"""Shards in, batches of uint8 images out, in an order known in advance.

For training (`loader.batches`) and for evaluation, which needs every sample once
(`loader.one_pass`). Start reading at `order.py`, which says what a run will read before anything is
read; then `index.py` (what is there), `reader.py` (bytes), `decode.py` (pixels), `pipeline.py`
(threads) and `loader.py`, which joins them.
"""
