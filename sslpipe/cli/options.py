"""The options of each evaluation, to refuse another one before torch is imported.

They are the arguments of its function, which needs torch; a test compares both.
"""

_FILES = "device help out pca whiten"  # of what takes two files of embeddings
_MODEL = "batch-size canvas-px checkpoint data device help num-workers out test-split train-split"

EVALUATE: dict[str, set[str]] = {
    name: {f"--{word}" for word in text.split()}
    for name, text in {
        "suite": f"{_MODEL} against baselines features no-baselines search seed",
        "sgd-augmented": f"{_MODEL} epochs flip-prob holdout rates seed smallest-crop",
        "few-shot": f"{_FILES} draws k labels-per-class search seed temperature vote",
        "geometry": f"{_FILES} most-rows pairs seed",
        "knn": f"{_FILES} exclude-same-id k no-exclude-same-id search temperature vote",
        "linear": f"{_FILES} grid holdout seed",
        "retrieval": f"{_FILES} denominator exclude-same-id ignore k lone no-exclude-same-id "
        "per-query similarity",
        "ridge": f"{_FILES} grid holdout seed",
        "sgd": f"{_FILES} batch-size epochs holdout rates seed",
        "stability": f"{_FILES} k search",
        "verification": f"{_FILES} far folds pairs seed",
    }.items()
}
