"""What a gallery, or a search, does to features by default."""

from collections.abc import Callable

from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.flatten import UNLABELLED_POWER, Power, choose_power
from sslpipe.evaluation.whiten import Whitening, fit_whitening

LEAST_FLATTENED = 100  # rows: docs/graded.md measures no fewer


def fit_flattening(
    rows: Embeddings, *, by_labels: bool, say: Callable[[str], None]
) -> tuple[Whitening | None, str]:
    """Fit what flattens features, on their own images alone.

    `by_labels`: labels, where there are enough, choose the power, or that none helps. `say` gets
    where rows are few. Returns None where the features stay as they are; and words for the user.
    """
    count = len(rows.ids)
    if count < LEAST_FLATTENED:
        return None, f"as they are: {count} images are too few to flatten ({LEAST_FLATTENED})"
    chosen = Power(UNLABELLED_POWER, f"power {UNLABELLED_POWER:g}", True)
    chosen = choose_power(rows) if by_labels else chosen
    if not chosen.helps:
        return None, f"as they are, which no flattening improves ({chosen.why})"
    fitted = fit_whitening(rows, power=chosen.power, say=say)
    return fitted, f"flattened, fitted on {count:,} images ({chosen.why})"
