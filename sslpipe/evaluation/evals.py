"""The table of evaluations of embedded files: each is a subcommand of `sslpipe evaluate`."""

from collections.abc import Callable

from sslpipe.evaluation.clustering import clusters
from sslpipe.evaluation.few_shot import few_shot_knn
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.linear_probe import linear_probe
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.retrieval import retrieval
from sslpipe.evaluation.verification import verification
from sslpipe.registry import Table

# (bank, queries, *, options) -> results
_BUILT_IN: dict[str, Callable[..., list[Result]]] = {
    "clusters": clusters,
    "few-shot": few_shot_knn,
    "knn": knn_results,
    "linear": linear_probe,
    "retrieval": retrieval,
    "verification": verification,
}
EVALS = Table("evaluation", _BUILT_IN, "sslpipe.evaluations")
