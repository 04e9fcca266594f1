"""Further augmentations of kornia by name: the recipe's `augment.extra`."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.augment.op import Draws
from sslpipe.errors import RecipeError, did_you_mean
from sslpipe.random import hash_integers


class ExtraOps(nn.Module):
    """Apply further kornia augmentations one image at a time: slow (some 0.5 ms an op and view).

    They see images in [0, 1] and must keep their shape. An op's random numbers come from torch's
    generator, forked and seeded by a hash of (seed, epoch, id, view, place in the list): the rows
    of a batch do not touch each other. `extra` as in FusedViews.

    Raises: RecipeError for an unknown name or key, or arguments that kornia refuses.
    """

    def __init__(self, extra: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.names = [_checked_name(entry, place) for place, entry in enumerate(extra)]
        self.views = [
            {1: (0,), 2: (1,), "both": (0, 1)}[entry.get("view", "both")] for entry in extra
        ]
        self.ops = nn.ModuleList(_construct(entry, place) for place, entry in enumerate(extra))

    def forward(self, views: Tensor, draws: Draws) -> Tensor:
        """Change views (n, 3, S, S) in [0, 1], whose rows `draws` are on the CPU.

        Raises:
            ValueError: an op changes the shape.
        """
        devices = [views.device] if views.is_cuda else []
        finished = []
        for row, (sample, number) in enumerate(
            zip(draws.ids.tolist(), draws.views.tolist(), strict=True)
        ):
            view = views[row : row + 1]
            for place, op in enumerate(self.ops):
                if number not in self.views[place]:
                    continue
                word = hash_integers((draws.seed, draws.epoch, sample, number, place))
                with torch.random.fork_rng(devices=devices):
                    torch.manual_seed(int(word) >> 1)
                    changed = op(view)
                if changed.shape != view.shape:
                    raise ValueError(
                        f"augment.extra[{place}] ({self.names[place]}) changes {tuple(view.shape)} "
                        f"into {tuple(changed.shape)}; use one that keeps the shape"
                    )
                view = changed
            finished.append(view)
        return torch.cat(finished)


def _augmentations() -> dict[str, type[nn.Module]]:
    """Return kornia's augmentations of single images by name."""
    import kornia

    base: type[nn.Module] = kornia.augmentation.AugmentationBase2D
    members = vars(kornia.augmentation).items()
    return {name: cls for name, cls in members if inspect.isclass(cls) and issubclass(cls, base)}


def _checked_name(entry: dict[str, Any], place: int) -> str:
    for key in entry:
        if key not in ("name", "view", "args"):
            raise RecipeError(
                f"augment.extra[{place}].{key} is unknown"
                f"{did_you_mean(key, ('name', 'view', 'args'))}; known: name, view, args"
            )
    name = entry.get("name")
    view = entry.get("view", "both")
    if name not in _augmentations():
        raise RecipeError(
            f"augment.extra[{place}].name = {name!r} is not an augmentation of kornia"
            f"{did_you_mean(str(name), _augmentations())}"
        )
    if view not in (1, 2, "both"):
        raise RecipeError(f"augment.extra[{place}].view = {view!r}; use 1, 2 or 'both'")
    return str(name)


def _construct(entry: dict[str, Any], place: int) -> nn.Module:
    arguments = entry.get("args", {})
    try:
        return _augmentations()[entry["name"]](**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise RecipeError(f"augment.extra[{place}].args = {arguments!r}: {error}") from error
