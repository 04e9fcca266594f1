"""PK batches: P classes with K images each, out of the stream of shards.

The plan is made on integers, like `data.order`, since the index knows every label: an epoch's
samples, in the order in which the streams read them, go through a bounded buffer sorted by label;
as soon as P labels have K samples waiting, a batch is taken out. Nothing of it depends on
processes, workers, or on where a run was resumed. (With `neighbours`, all processes follow one
table, but it sorts learned means, which are equal over numbers of processes only to rounding.)
`pk_loader` reads such a plan. Source of P and K: Hermans et al. 2017, arXiv:1703.07737, section 2.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.index import Split
from sslpipe.data.order import Order
from sslpipe.errors import DataError

Integers = NDArray[np.int64]
# epoch -> (C, size) places in `classes` of each class's nearest ones, itself first; None: not known
NearestClasses = Callable[[int], Integers | None]

PK_VERSION = 2  # part of a fine-tuning's digest: raise it whenever a plan below changes
MOST_PASSES = 16  # over the data in one epoch; see PKOrder


class EpochBatches(NamedTuple):
    """Hold one epoch's batches."""

    ids: Integers  # (T, B) each batch's samples: K of each of its P classes, then the random ones
    chunks: Integers  # (T, B) the global step of the underlying order in which each is read


class BatchesDoNotFit(DataError):
    """The batches that are asked for cannot be made of these labels.

    Attributes:
        reason: Without the remedy.
        classes: How many there are with enough images, at most those of a batch.
    """

    def __init__(self, reason: str, remedy: str, classes: int) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.classes = classes


class PKOrder:
    """Plan which samples stand in which batch, for a whole run.

    An epoch has as many batches as the first pass over the data gives in epoch 0; where a later
    epoch's first pass gives fewer, it takes another one. Samples without a label, and classes with
    fewer than K samples, are skipped. A pass reads whole batches and omits the samples that are
    left then, in each epoch others; where that leaves no batch, it reads all, as far as the streams
    have equally many. What still waits when an epoch ends is dropped.

    Without `with_nearest`, and in epochs for which it knows nothing, classes come in no groups.

    Args:
        split: Whose labels are planned on.
        seed: Of the order.
        classes_per_batch: P.
        images_per_class: K.
        buffer: Samples that may wait, at least 2 B, B = P K + R. Beyond it the oldest is dropped;
            beyond a label's share of it, buffer / P, that label's newest.
        random_images: R further samples of other classes in each batch, the ones that wait longest
            (FaceNet's random negatives).
        neighbours: The P classes come in groups of one and so many that lie nearest to it, of those
            not in the batch yet; where the buffer is too full to wait for them, or a whole pass has
            gone by, those of the row that are ready, then any.
        num_streams: Of the underlying `Order`.
        window: Of the underlying `Order`.
        without: Sorted ids that are never served.

    Raises:
        BatchesDoNotFit: P classes with K samples are not there, or do not meet in the buffer, or
            leave fewer than R of other classes.
    """

    def __init__(
        self,
        split: Split,
        *,
        seed: int,
        classes_per_batch: int,
        images_per_class: int,
        buffer: int,
        random_images: int = 0,
        neighbours: int = 0,
        num_streams: int = 1,
        window: int = 256,
        without: Integers | None = None,
    ) -> None:
        self.neighbours = neighbours
        self._nearest: NearestClasses = lambda epoch: None
        self.classes_per_batch = classes_per_batch
        self.images_per_class = images_per_class
        self.random_images = random_images
        self.buffer = buffer
        self.batch_size = classes_per_batch * images_per_class + random_images
        if buffer < 2 * self.batch_size:
            raise DataError(
                f"sampler.buffer = {buffer} is less than two batches of {self.batch_size}; "
                f"use at least {2 * self.batch_size}"
            )
        self.labels = split.labels.copy()
        if without is not None:
            self.labels[without] = -1
        classes, sizes = np.unique(self.labels[self.labels >= 0], return_counts=True)
        self.classes = classes[sizes >= images_per_class]
        self.small_classes = int((sizes < images_per_class).sum())
        self._check_classes(sizes)
        left = int(np.isin(self.labels, self.classes).sum())
        read_together = -(-self.batch_size // num_streams) * num_streams  # as much of each stream
        if read_together > left:
            smaller = "num_streams" if self.batch_size <= left else "random_images"
            raise BatchesDoNotFit(
                f"sampler.num_streams = {num_streams} read {read_together} samples for a batch of "
                f"{self.batch_size}, and there are {left} to train on",
                f"use a smaller sampler.{smaller}",
                classes=classes_per_batch,
            )
        by_label = np.argsort(self.labels, kind="stable")  # ids ascend inside a class
        begin = np.searchsorted(self.labels[by_label], self.classes)
        kept = sizes[sizes >= images_per_class]
        spans = zip(self.classes.tolist(), begin.tolist(), kept.tolist(), strict=True)
        self.members = {c: by_label[start : start + size] for c, start, size in spans}
        self.epoch = lru_cache(maxsize=2)(self._plan)
        for size in (read_together, num_streams):  # the second omits almost nothing
            self.order = Order(
                split.starts,
                seed=seed,
                batch_size=size,
                num_streams=num_streams,
                window=window,
                without=np.flatnonzero(~np.isin(self.labels, self.classes)),
            )
            waiting = self._buffer(epoch=0)
            self.steps_per_epoch = sum(1 for _ in self._batches(0, 1, waiting))
            if self.steps_per_epoch:
                break
        else:
            raise self._no_batch()
        self.samples = self.order.samples
        self.dropped = waiting.dropped
        self.used = self.steps_per_epoch * self.batch_size  # of the samples of the first pass

    def _check_classes(self, sizes: Integers) -> None:
        """Raise BatchesDoNotFit where too few classes have enough images; (c,) sizes of all."""
        count = len(self.classes)
        if count >= self.classes_per_batch:
            return
        # the most images that as many classes have as a batch takes
        padded = np.append(sizes, [0] * self.classes_per_batch)
        images = int(np.sort(padded)[-self.classes_per_batch])
        works = []
        if images > 1:
            works.append(f"sampler.images_per_class={images}")
        if count > 1:
            works.append(f"sampler.classes_per_batch={count}")
        raise BatchesDoNotFit(
            f"sampler.classes_per_batch = {self.classes_per_batch}, but {count} classes have "
            f"sampler.images_per_class = {self.images_per_class} images to train on",
            f"set {' or '.join(works)}" if works else "too few have two images",
            classes=count,
        )

    def _no_batch(self) -> BatchesDoNotFit:
        """Return why a pass gives no batch: too small a buffer, or too few random images."""
        samples = self.order.samples
        wanted = f"{self.classes_per_batch} classes with {self.images_per_class} images each"
        remedy = "lower sampler.classes_per_batch or sampler.images_per_class"
        if self.buffer < samples:
            reason = f"no {wanted} meet in sampler.buffer = {self.buffer} samples"
            remedy = f"use a larger one, up to {samples}, or {remedy}"
        elif self.random_images:
            reason = (
                f"{wanted} leave fewer than sampler.random_images = {self.random_images} of other "
                f"classes, among {samples} to train on"
            )
            remedy = f"use fewer of these, or {remedy}"
        else:
            reason = (
                f"sampler.num_streams = {self.order.num_streams} read equally many of {samples} "
                f"samples each, and the rest is lacking for {wanted}"
            )
            remedy = f"use one stream, or {remedy}"
        return BatchesDoNotFit(reason, remedy, classes=self.classes_per_batch)

    def with_nearest(self, nearest: NearestClasses) -> "PKOrder":
        """Return this order with classes in groups; an epoch's plan asks `nearest` once."""
        order = copy.copy(self)
        order._nearest = nearest
        order.epoch = lru_cache(maxsize=2)(order._plan)
        return order

    def ids(self, step: int) -> Integers:
        """Return (B,) sample ids of one step, over all processes."""
        epoch, within = divmod(step, self.steps_per_epoch)
        ids: Integers = self.epoch(epoch).ids[within]
        return ids

    def _plan(self, epoch: int) -> EpochBatches:
        taken = list(
            islice(self._batches(epoch, MOST_PASSES, self._buffer(epoch)), self.steps_per_epoch)
        )
        if len(taken) < self.steps_per_epoch:
            raise DataError(
                f"epoch {epoch}: {MOST_PASSES} passes over the data give {len(taken)} batches, not "
                f"{self.steps_per_epoch}; use a larger sampler.buffer, up to {self.samples}, or a "
                "smaller sampler.classes_per_batch"
            )
        pairs = np.array(taken, np.int64)  # (T, B, 2)
        return EpochBatches(ids=pairs[:, :, 0], chunks=pairs[:, :, 1])

    def _buffer(self, epoch: int) -> "ClassBuffer":
        table = self._nearest(epoch)
        nearest = None
        if table is not None:
            nearest = dict(zip(self.classes.tolist(), self.classes[table].tolist(), strict=True))
        return ClassBuffer(
            classes=self.classes_per_batch,
            images=self.images_per_class,
            others=self.random_images,
            capacity=self.buffer,
            nearest=nearest,
            group=self.neighbours + 1,
        )

    def _batches(
        self, epoch: int, passes: int, waiting: "ClassBuffer"
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield the batches of so many passes over the data: samples with their chunks."""
        steps = self.order.steps_per_epoch
        streams = range(self.order.num_streams)
        first = steps * MOST_PASSES * epoch
        for chunk in range(first, first + steps * passes):
            _, ids = self.order.ids(chunk, streams)
            for sample in ids.tolist():
                batch = waiting.add(sample, int(self.labels[sample]), chunk)
                if batch is not None:
                    yield batch


@dataclass(eq=False)
class ClassBuffer:
    """Hold samples until a batch of their classes is complete; the order of arrival decides all."""

    classes: int  # labels in a batch, P
    images: int  # samples of each, K
    others: int  # further samples of other labels, the ones that wait longest
    capacity: int  # samples that may wait; beyond it the oldest is dropped
    # label -> labels, itself first; a batch's labels then come in groups, which wait for each other
    # until the buffer is full, or a sample comes again that is still waiting
    nearest: dict[int, list[int]] | None = None
    group: int = 1  # labels in a group

    def __post_init__(self) -> None:
        self._share = self.capacity // self.classes  # of a label; beyond it its newest is dropped
        self._waiting: OrderedDict[int, tuple[int, int]] = OrderedDict()  # id -> label, chunk
        self._of_label: defaultdict[int, deque[int]] = defaultdict(deque)  # ids, oldest first
        self._ready: OrderedDict[int, None] = OrderedDict()  # labels with enough, first come first
        self.dropped = 0

    def add(self, sample: int, label: int, chunk: int) -> list[tuple[int, int]] | None:
        """Take a sample in; if that makes a batch, return its samples with their chunks."""
        members = self._of_label[label]
        again = sample in self._waiting  # a whole pass has gone by: enough of waiting
        if not again:
            if len(members) == self._share:
                self.dropped += 1
                return None
            members.append(sample)
            self._waiting[sample] = label, chunk
            if len(members) == self.images:
                self._ready[label] = None
        full = len(self._waiting) > self.capacity
        # groups are looked for where a label more is ready, or may wait no longer
        if self.nearest is None or full or again or len(members) == self.images:
            chosen = self._choose(wait=not (full or again))
            if chosen:
                return self._take(chosen)
        if full:
            self._remove(next(iter(self._waiting)))
            self.dropped += 1
        return None

    def _choose(self, *, wait: bool) -> list[int]:
        """Choose the labels of a batch; [] where they, or the other samples, are not there yet."""
        if len(self._ready) < self.classes:
            return []
        if self.nearest is None:
            chosen = list(self._ready)[: self.classes]
        else:
            chosen = self._in_groups(self.nearest, wait=wait)
        of_chosen = sum(len(self._of_label[label]) for label in chosen)
        enough_others = len(self._waiting) - of_chosen >= self.others
        return chosen if len(chosen) == self.classes and enough_others else []

    def _in_groups(self, nearest: dict[int, list[int]], *, wait: bool) -> list[int]:
        """Choose labels that are ready, each with its nearest; too few where it has to wait."""
        chosen: list[int] = []
        for anchor in self._ready:
            if anchor in chosen:
                continue
            near = (label for label in nearest[anchor] if label not in chosen)
            if not wait:  # those of the row that are ready; behind them, any
                ranked = dict.fromkeys([*nearest[anchor], *self._ready])
                near = (c for c in ranked if c in self._ready and c not in chosen)
            group = list(islice(near, self.group))
            if all(label in self._ready for label in group):
                chosen += group
            if len(chosen) == self.classes:
                break
        return chosen

    def _take(self, chosen: list[int]) -> list[tuple[int, int]]:
        samples = [self._of_label[label][k] for label in chosen for k in range(self.images)]
        others = (s for s, (label, _) in self._waiting.items() if label not in chosen)
        samples += [s for s, _ in zip(others, range(self.others), strict=False)]
        return [(sample, self._remove(sample)) for sample in samples]

    def _remove(self, sample: int) -> int:
        """Its label's oldest sample leaves; returns its chunk."""
        label, chunk = self._waiting.pop(sample)
        members = self._of_label[label]
        oldest = members.popleft()
        assert oldest == sample
        if len(members) < self.images:
            self._ready.pop(label, None)
        return chunk
