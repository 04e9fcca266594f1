"""Frozen features in, numbers out; each with its protocol, counts and an interval.

For whoever compares backbones: from arrays (`arrays`), from files of embeddings (the entries of
`evals.EVALS`), during training (`monitor.py`), or all at once (`table.run_suite`; `comparison.py`
decides what is better, `verdict.py` says it). Start reading at `result.py`, which every evaluation
returns, then `embed.py` (images to features; in files: `feature_files.py`) and `knn.py`. Nothing is
imported here: a training's monitor needs a few of these modules.
"""
