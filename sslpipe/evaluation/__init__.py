"""Frozen features in, numbers out; each with its protocol, counts and an interval.

For whoever compares backbones: from arrays (`arrays`), from files of embeddings (the entries of
`EVALS`), during training (`monitor.py`), or all at once (`suite.run_suite`; `verdict.py` decides
what is better). Start reading at `result.py`, which every evaluation returns, then `embed.py`
(images to features) and `knn.py`.
"""

from collections.abc import Callable

from sslpipe.evaluation.clusters import clusters
from sslpipe.evaluation.knn import few_shot_knn, knn_results
from sslpipe.evaluation.linear_probe import linear_probe, ridge_probe
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.retrieval import retrieval
from sslpipe.evaluation.verification import verification
from sslpipe.registry import Table

# (bank, queries, *, options) -> results; each entry is a subcommand of `sslpipe evaluate`
_BUILT_IN: dict[str, Callable[..., list[Result]]] = {
    "clusters": clusters,
    "few-shot": few_shot_knn,
    "knn": knn_results,
    "linear": linear_probe,
    "retrieval": retrieval,
    "ridge": ridge_probe,
    "verification": verification,
}
EVALS = Table("evaluation", _BUILT_IN, "sslpipe.evaluations")
