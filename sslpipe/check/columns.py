"""What the columns of a data set say before a run: partners, their cost, groups that straddle."""

from dataclasses import dataclass

import numpy as np

from sslpipe.check.tables import Rows
from sslpipe.data.index import DatasetIndex
from sslpipe.data.order import WELL_MIXED, Order, mixing_score
from sslpipe.data.pairing import Pairing, Survey, joint_codes

MOST_NAMED = 6


@dataclass(frozen=True)
class PairsCheck:
    """Who finds a partner in the batches looked at.

    Args:
        found: As the recipe says.
        in_split: The same for pairs.reach = "split".
        order: Of the run.
        mixing: Of the groups of pairs.positive, as `mixing_score`; None: no columns, or one group.
    """

    found: Survey
    in_split: Survey
    order: Order
    mixing: float | None


def check_pairs(pairing: Pairing | None, order: Order, steps: list[int]) -> PairsCheck | None:
    """Draw the partners of some steps of the first epoch; None where nobody has a partner."""
    if pairing is None or pairing.partners is None:
        return None
    partners, mixing = pairing.partners, None
    if partners.same:
        every = np.arange(len(pairing.split))
        codes = joint_codes(partners.same, every)
        codes = np.where(codes < 0, codes.max(initial=0) + 1 + every, codes)
        codes = np.unique(codes, return_inverse=True)[1]
        served = np.setdiff1d(every, order.without, assume_unique=True)
        batches = [order.ids(step, range(order.num_streams))[1] for step in steps]
        mixing = mixing_score([codes[ids] for ids in batches], codes[served])
    found = pairing.survey(steps)
    window = pairing.pairs.reach == "window"
    in_split = pairing.survey(steps, "split") if window and partners.bases else found
    return PairsCheck(found, in_split, order, mixing)


def pair_rows(check: PairsCheck | None) -> Rows:
    """Make rows of a table."""
    if check is None:
        return []
    found, wide, order = check.found, check.in_split, check.order
    wanted = max(1, found.partners + found.lonely)
    inside = found.partners - found.outside
    text = (
        f"{found.partners / wanted:.1%} of the samples that should have one do, "
        f"{inside / max(1, found.partners):.1%} of these in the window that is read"
    )
    cost = f"{found.reads_an_epoch(order)} an epoch, unless run.cache holds them"
    if wide is not found:
        text += f"; in all of the split {wide.partners / wanted:.1%} would"
        cost = f"none; pairs.reach = 'split' would cost {wide.reads_an_epoch(order)} an epoch"
    rows = [("partners", text), ("reads of other partners", cost)]
    if check.mixing is not None:
        rows.append(("mixing score of groups", f"{check.mixing:.4f} (1: as a uniform shuffle)"))
    return rows


def poorly_mixed_groups(check: PairsCheck | None) -> str | None:
    """Warn where batches hold fewer groups than a uniform shuffle's; None where they do not."""
    if check is None or check.mixing is None or check.mixing >= WELL_MIXED:
        return None
    order = check.order
    return (
        f"mixing score of groups {check.mixing:.3f}: each of {order.num_streams} streams gives "
        f"{order.batch_size // order.num_streams} samples to a batch from windows of "
        f"{order.window}, which hold few groups side by side; raise data.shuffle_window or "
        "data.num_streams"
    )


def straddle_warning(index: DatasetIndex, split_name: str) -> str | None:
    """Say which columns have values both in a split and in others of its data set.

    Only texts and integers are looked at: times and floats name nothing.
    """
    found = []
    for name, entry in index.manifest.columns.items():
        if entry.kind not in ("text", "integer") or split_name not in entry.splits:
            continue
        own = index.split(split_name).column(name).groups.values
        for other in sorted(set(entry.splits) - {split_name}):
            theirs = index.split(other).column(name).groups.values
            shared = len(np.intersect1d(own, theirs, assume_unique=True))
            if shared:
                found.append(f"{shared:,} of {len(theirs):,} values of {name} in {other}")
    if not found:
        return None
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return (
        f"groups straddle splits: {', '.join(found[:MOST_NAMED])}{more} are in {split_name}, too; "
        "where a column names what must not be shared, such as a patient, build with --split-by"
    )
