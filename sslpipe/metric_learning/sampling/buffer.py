"""The bounded buffer in which samples wait until a batch of their classes can be taken out."""

from collections import OrderedDict, defaultdict, deque
from itertools import islice


class ClassBuffer:
    """Hold samples until a batch of their classes is complete; the order of arrival decides all.

    Args:
        classes: Labels in a batch, P.
        images: Samples of each, K.
        others: Further samples of other labels, the ones that wait longest.
        capacity: Samples that may wait. Beyond it the oldest is dropped; beyond a label's share,
            capacity / classes, that label's newest.
        nearest: Label -> labels, itself first; a batch's labels then come in groups of `group`,
            which wait for each other until the buffer is full, or a sample comes again that is
            still waiting.
        group: Labels in a group.
    """

    def __init__(
        self,
        classes: int,
        images: int,
        others: int,
        capacity: int,
        nearest: dict[int, list[int]] | None = None,
        group: int = 1,
    ) -> None:
        self._classes, self._images, self._others = classes, images, others
        self._nearest, self._group = nearest, group
        self._capacity, self._share = capacity, capacity // classes
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
            if len(members) == self._images:
                self._ready[label] = None
        full = len(self._waiting) > self._capacity
        crowded = full or again
        if len(self._ready) >= self._classes:
            if self._nearest is None:
                chosen = list(self._ready)[: self._classes]
            elif crowded or len(members) == self._images:  # a label more is ready
                chosen = self._in_groups(self._nearest, crowded)
            else:
                return None
            own = sum(len(self._of_label[c]) for c in chosen)
            if len(chosen) == self._classes and len(self._waiting) - own >= self._others:
                return self._take(chosen)
        if full:
            self._remove(next(iter(self._waiting)))
            self.dropped += 1
        return None

    def _in_groups(self, nearest: dict[int, list[int]], crowded: bool) -> list[int]:
        """Labels ready first, each with its nearest; fewer than a batch's if it has to wait."""
        chosen: list[int] = []
        for anchor in self._ready:
            if anchor in chosen:
                continue
            near = (label for label in nearest[anchor] if label not in chosen)
            group = list(islice(near, self._group))
            if crowded:  # those of the row that are ready; behind them, any
                ranked = dict.fromkeys([*nearest[anchor], *self._ready])
                near = (c for c in ranked if c in self._ready and c not in chosen)
                group = list(islice(near, self._group))
            if all(label in self._ready for label in group):
                chosen += group
            if len(chosen) == self._classes:
                break
        return chosen

    def _take(self, chosen: list[int]) -> list[tuple[int, int]]:
        samples = [self._of_label[label][k] for label in chosen for k in range(self._images)]
        others = (s for s, (label, _) in self._waiting.items() if label not in chosen)
        samples += [s for s, _ in zip(others, range(self._others), strict=False)]
        return [(sample, self._remove(sample)) for sample in samples]

    def _remove(self, sample: int) -> int:
        """Its label's oldest sample leaves; returns its chunk."""
        label, chunk = self._waiting.pop(sample)
        members = self._of_label[label]
        oldest = members.popleft()
        assert oldest == sample
        if len(members) < self._images:
            self._ready.pop(label, None)
        return chunk
