"""What an augmentation is: an Op. The ops and their list, OPS, are in ops.py."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.augment.spec import ViewSpec
from sslpipe.data.pipeline import send
from sslpipe.random import hash_integers

Array = NDArray[Any]


@dataclass(frozen=True)
class Draws:
    """The parameters of V views (1 or 2) of B samples: all first views, then all second.

    `draws.sigma` is short for `draws.params["sigma"]`.
    """

    seed: int
    epoch: int  # in a fine-tuning, which may use a sample twice an epoch, the step
    ids: Tensor  # (VB,) int64, the samples
    views: Tensor  # (VB,) int64 in {0, 1}
    params: Mapping[str, Tensor]  # of each op, by name: (VB, ...)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self.params:  # copy and pickle ask for the former
            raise AttributeError(f"no op has drawn {name!r}")
        return self.params[name]

    @property
    def num_images(self) -> int:
        """B: how many rows each view has."""
        return int((self.views == self.views[:1]).sum())

    def rows(self, index: Tensor | slice, names: Iterable[str] | None = None) -> "Draws":
        """Return some of the rows, in the order of `index`, with all parameters or those named."""
        params = {
            name: self.params[name][index] for name in (self.params if names is None else names)
        }
        return replace(self, ids=self.ids[index], views=self.views[index], params=params)

    def to(self, device: torch.device | str) -> "Draws":
        """Return the same on a device."""
        ids, views, *values = (
            part.to(device, non_blocking=True)
            for part in (self.ids, self.views, *self.params.values())
        )
        params = dict(zip(self.params, values, strict=True))
        return replace(self, ids=ids, views=views, params=params)


class Chunk(NamedTuple):
    """Some of the views, changed together by FusedViews. Most ops read `draws` and `specs` only."""

    draws: Draws  # the n rows of the chunk, on the CPU
    specs: tuple[ViewSpec, ...]  # of the first views, of the second
    rows: Tensor  # (n,) int64: which of the 2B views they are
    from_bytes: bool  # whether they are cut out of the uint8 images; else out of float32 ones
    cut: Callable[[Tensor], Tensor]  # crop and flip: images to the chunk's views
    jitter: Callable[[Tensor], Tensor] | None  # of all rows, perhaps in place; None: of none
    params: Mapping[str, Tensor]  # those of `draws` on the views' device


class Op:
    """One augmentation: a subclass with the attributes below, an instance in OPS.

    Attributes:
        name: in messages and `register_op(..., before=name)`.
        settings: the keys `augment.<key>` that it adds, each made by `setting(default, doc)`.
        optional: whether views have it only where one of its settings is not 0.
        params: the names of what it draws, as the attributes of Draws.
        lanes: which of a view's random numbers it takes; no two ops share one. 0 to 33 belong to
            the built-in ops; others take `named_lanes(name, count)`.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    optional: ClassVar[bool] = False
    params: ClassVar[tuple[str, ...]]
    lanes: ClassVar[Sequence[int]]

    def draw(self, u: Array, sizes: Array, spec: ViewSpec) -> tuple[Array, ...]:
        """Make the parameters of B views from uniform numbers.

        Args:
            u: (B, lanes) float64 in [0, 1).
            sizes: (B, 2) int64, height and width of the images in pixels.
            spec: the view's settings.

        Returns:
            An array (B, ...) for each name of `params`; a row depends on that of `u` and `sizes`.
        """
        raise NotImplementedError

    def apply(self, views: Tensor, chunk: Chunk) -> Tensor:
        """Change views (n, C, S, S) float32 in [0, 1], planar, perhaps in place.

        Their parameters are in `chunk.draws` on the CPU, and in `chunk.params` on the views'
        device, where reading them does not make the host wait. Channels other than red, green and
        blue (`chunk.specs[0].rgb` is False) may be beyond [0, 1], and stay so.
        """
        raise NotImplementedError

    def apply_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        """Do the same to one view: the reference, by kornia where it has the op.

        Args:
            view: (1, C, S, S) float32, as in `apply`.
            draw: its row, on the CPU: `draw.<parameter>` is (1, ...).
            spec: its settings.
        """
        raise NotImplementedError

    def describe(self, draw: Draws, spec: ViewSpec, size: tuple[int, int]) -> list[str]:
        """Describe in few words what was done to one view; draw: its row; size: the image's."""
        raise NotImplementedError


class MaskedOp(Op):
    """An op that is done to a view with probability `<name>_prob`, independent of the others.

    The first parameter is the bool mask, named as the op; the first lane decides it.
    """

    label: ClassVar[str]  # in the preview

    def draw(self, u: Array, sizes: Array, spec: ViewSpec) -> tuple[Array, ...]:
        """Draw the mask, and what `draw_params` makes of the other lanes."""
        done = u[:, 0] < getattr(spec, f"{self.name}_prob")
        return done, *self.draw_params(u[:, 1:], spec)

    def draw_params(self, u: Array, spec: ViewSpec) -> tuple[Array, ...]:
        """Make the parameters after the mask, of all rows: see `draw`; u is without its lane."""
        return ()

    def apply(self, views: Tensor, chunk: Chunk) -> Tensor:
        """Change the rows of the mask."""
        rows = masked_rows(chunk.draws.params[self.name])
        if rows is not None:
            chosen = send([rows], views.device)[0] if isinstance(rows, Tensor) else rows
            part = views[chosen]
            draws = chunk.draws.rows(rows, self.params)
            params = {name: chunk.params[name][chosen] for name in self.params}
            changed = self.change(part, chunk._replace(draws=draws, params=params))
            if changed is not part or not isinstance(rows, slice):  # else it is done, in place
                views[chosen] = changed
        return views

    def change(self, views: Tensor, chunk: Chunk) -> Tensor:
        """Change the n views of the mask: see `apply`.

        The chunk's `draws` and `params` have a row for each of them and this op's parameters only,
        `params` without the mask; its other fields may have more rows.
        """
        raise NotImplementedError

    def apply_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        """Change the view where its mask is set."""
        return self.change_one(view, draw, spec) if draw.params[self.name] else view

    def change_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        """Change one view of the mask: see `apply_one`."""
        raise NotImplementedError

    def describe(self, draw: Draws, spec: ViewSpec, size: tuple[int, int]) -> list[str]:
        """Return the label where the mask is set."""
        return [self.label] if draw.params[self.name] else []


def masked_rows(mask: Tensor) -> slice | Tensor | None:
    """Return where a (n,) bool mask on the CPU is set: None, a slice where one does, or indices."""
    flags = mask.tolist()
    count = sum(flags)
    if not count:
        return None
    first = flags.index(True)
    if all(flags[first : first + count]):
        return slice(first, first + count)
    return mask.nonzero()[:, 0]


def named_lanes(name: str, count: int) -> range:
    """Return lanes that are a function of a name, far from the built-in ops' and other names'."""
    first = int(hash_integers(name.encode())) >> 2  # + count stays an int64
    return range(first, first + count)


def by_kornia(function: str, *args: Any) -> Tensor:
    """Call a function of kornia by its name; it is imported late, and has no types."""
    import kornia

    result: Tensor = attrgetter(function)(kornia)(*args)
    return result
