"""Whether a run's evaluations can tell which of its weights are better, and by which number."""

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.subsets import with_a_partner
from sslpipe.errors import RecipeError
from sslpipe.recipe.sections import RunConfig
from sslpipe.run.best import LABELLED, TITLES, UNLABELLED


def can_choose(labels: NDArray[np.int64], *, views: bool) -> bool:
    """Return whether evaluations of held-out images can tell which weights are better.

    Args:
        labels: Of these images, -1 without. With a single class every evaluation is right, and
            without two images of one class none is.
        views: Whether their other views are searched for, which needs no label.
    """
    known = labels[labels >= 0]
    if len(np.unique(known)) > 1 and with_a_partner(labels):
        return True
    return views and len(labels) > 0


def watch_text(config: RunConfig, labels: NDArray[np.int64], *, views: bool) -> str:
    """Return which number of a run to watch, and whether it decides which weights are kept.

    Args:
        config: The recipe's [run], resolved.
        labels: As in `can_choose`.
        views: As in `can_choose`.
    """
    if not len(labels):
        return "nothing is held out: no score shows whether training helps"
    held = f"{len(labels):,} held-out images"
    if not config.monitor_steps:
        return f"run.monitor_steps = 0: {held} are not scored"
    if can_choose(labels, views=False):
        title = TITLES[LABELLED[0]]
    elif can_choose(labels, views=views):
        title = TITLES[UNLABELLED]
    else:
        return f"no score: {held} of one class, or of classes of one image"
    kept = "best" if config.keep == "best" else "last"
    return f"{title} ({held}, every {config.monitor_steps:,} steps); the {kept} weights are kept"


def choosing_nothing(config: RunConfig) -> str:
    """Write overrides with which a run chooses no weights, and ends at its last step."""
    keep = "run.keep=last" if config.keep == "best" else ""
    patience = "run.patience=0" if config.patience else ""
    return " ".join(filter(None, (keep, patience)))


def check_choice(config: RunConfig, labels: NDArray[np.int64], *, views: bool, remedy: str) -> None:
    """Raise RecipeError where no evaluation of a run could decide its run.keep or run.patience.

    Args:
        config: The recipe's [run].
        labels: As in `can_choose`.
        views: As in `can_choose`.
        remedy: What to change.
    """
    setting = "run.keep = 'best'" if config.keep == "best" else "run.patience"
    if config.keep != "best" and not config.patience:
        return
    if not config.monitor_steps:
        raise RecipeError(
            f"{setting} needs evaluations to choose by, and run.monitor_steps = 0; {remedy}"
        )
    if not can_choose(labels, views=views):
        raise RecipeError(f"{setting} has no held-out images to choose by; {remedy}")
