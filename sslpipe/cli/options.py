"""The options of each evaluation, to refuse another one before torch is imported.

They are the arguments of its function, which needs torch; a test compares both.
"""

_FILES = "data device erase gallery help out pca query whiten"  # of what takes two embeddings
_MODEL = "batch-size canvas-px checkpoint data device help num-workers out test-split train-split"
_MODEL += " weights"

EVALUATE: dict[str, set[str]] = {
    name: {f"--{word}" for word in text.split()}
    for name, text in {
        "suite": f"{_MODEL} against baselines columns features leakage no-baselines no-leakage "
        "search seed",
        "sgd-augmented": f"{_MODEL} epochs flip-prob holdout rates seed smallest-crop",
        "few-shot": f"{_FILES} by draws k labels-per-class search seed temperature vote",
        "geometry": f"{_FILES} most-rows pairs seed",
        "knn": f"{_FILES} by exclude-same exclude-same-id k no-exclude-same-id search temperature "
        "vote",
        "linear": f"{_FILES} by exclude-same grid holdout seed",
        "nuisance": f"{_FILES} column holdout most-rows probe seed",
        "retrieval": f"{_FILES} by cross denominator exclude-same exclude-same-id ignore k lone "
        "no-exclude-same-id per-query similarity",
        "ridge": f"{_FILES} by exclude-same grid holdout seed",
        "sgd": f"{_FILES} batch-size epochs holdout rates seed",
        "verification": f"{_FILES} exclude-same far folds pairs seed",
    }.items()
}

# take the name of a column of the data set
COLUMN_OPTIONS = ("--by", "--column", "--columns", "--cross", "--erase", "--exclude-same")
