"""Batches of a data set's train split, as a run takes them."""

from itertools import islice

import torch

from sslpipe.data.loader import batches
from sslpipe.data.order import Order
from sslpipe.data.pairing import plan_pairs
from sslpipe.data.subsets import held_out
from sslpipe.distributed import Rank
from sslpipe.recipe.sections import RunConfig

FIELDS = ("images", "sizes", "labels", "ids", "source_ids")


def order_of(split, *, batch_size=16, num_streams=4, window=6, holdout=0, seed=1):
    """The order of a run."""
    without = held_out(split.labels, holdout) if holdout else None
    sizes = {"batch_size": batch_size, "num_streams": num_streams, "window": window}
    return Order(split.starts, seed=seed, without=without, **sizes)


def take(index, steps, *, first=0, rank=0, world=1, bad=None, pairs=None, canvas_px=32,
         run=None, **of_order):  # fmt: skip
    """A process's first batches; `bad` gets the samples that cannot be used."""
    split = index.split("train")
    order = order_of(split, **of_order)
    pairing = plan_pairs(pairs, split, order)
    made = batches(
        pairing.split if pairing else split,
        order,
        RunConfig(**(run or {})),
        Rank(rank, world),
        canvas_px=canvas_px,
        first_step=first,
        on_bad=([] if bad is None else bad).append,
        pairing=pairing,
    )
    taken = list(islice(made, steps))
    made.close()
    return taken


def take_all(index, steps, world, **settings):
    """The batches of all ranks put together, as dicts of FIELDS."""
    parts = [take(index, steps, rank=rank, world=world, **settings) for rank in range(world)]
    return [
        {name: torch.cat([getattr(batch, name) for batch in ranks]) for name in FIELDS}
        for ranks in zip(*parts, strict=True)
    ]


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS) and (
        a.epoch == b.epoch
    )
