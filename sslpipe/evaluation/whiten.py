"""PCA whitening: learned on train features, applied alike to both sides of comparisons."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor, nn

from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings

# Of the mean variance, added to every variance: directions of noise stay small. Chosen on train:
# kNN on raw pixels, Fashion-MNIST, 8,000 of train against 2,000 of train: 86 %, with no floor 83 %.
FLOOR = 0.1
MOST_SHRUNK = 0.9  # of few rows: a spectrum is never all made flat
PART_NUMBERS = 2**23  # of features, in float64 at a time: 64 MiB


class Whitening(NamedTuple):
    """A map of features: (features - mean) @ projection, (F,) and (F, D) float64."""

    mean: Tensor
    projection: Tensor

    def __repr__(self) -> str:
        width, kept = self.projection.shape
        return f"Whitening({width} -> {kept} features)"

    def __call__(self, rows: Embeddings, *, in_place: bool = False) -> Embeddings:
        """Map the features of some rows."""
        return rows._replace(features=self.apply(rows.features, in_place=in_place))

    def apply(self, features: Tensor, *, in_place: bool = False) -> Tensor:
        """Map features, (N, F) -> (N, D) float32; `in_place` in their memory where it fits."""
        mean = self.mean.to(features.device)
        projection = self.projection.to(features.device)
        shape = len(features), projection.shape[1]
        fits = in_place and features.shape == shape and features.dtype == torch.float32
        mapped = features if fits else features.new_empty(shape, dtype=torch.float32)
        rows = part_rows(features)
        for part, out in zip(torch.split(features, rows), torch.split(mapped, rows), strict=True):
            out.copy_(part.double().sub_(mean) @ projection)
        return mapped


class WhiteningLayer(nn.Module):
    """A whitening as a layer, in float32, for programs that hold a whole network."""

    mean: Tensor  # (F,)
    projection: Tensor  # (F, D)

    def __init__(self, whitening: Whitening) -> None:
        super().__init__()
        self.register_buffer("mean", whitening.mean.float())
        self.register_buffer("projection", whitening.projection.float())

    def forward(self, features: Tensor) -> Tensor:
        """Map features, (N, F) -> (N, D). The mean goes first, before float32 loses digits."""
        return (features - self.mean) @ self.projection


def fit_whitening(
    train: Embeddings,
    floor: float | None = None,
    dims: int | None = None,
    power: float = 1.0,
    say: Callable[[str], None] = lambda text: None,
) -> Whitening:
    """Rotate to the principal axes of `train` and divide each by its spread to the `power`.

    Args:
        train: Rows to learn the axes from.
        floor: Added to each variance, as a share of the mean variance; 0 whitens fully and needs
            more rows than features. None: FLOOR, or more where rows are few; see `floor_for`.
        dims: Axes of the largest variances that are kept; None: all.
        power: 1 whitens, less flattens the spectrum in part, 0 only centres and rotates.
        say: Called with a line where rows are few.
    """
    return fit_powers(train=train, powers=(power,), floor=floor, dims=dims, say=say)[0]


def fit_powers(
    train: Embeddings,
    powers: Sequence[float],
    floor: float | None = None,
    dims: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    some: Tensor | None = None,
) -> list[Whitening]:
    """Fit the principal axes once, and return what `fit_whitening` does for each power.

    `some` are numbers of rows: only these are learned from, without a copy of them.
    """
    if wrong := [power for power in powers if not 0 <= power <= 1]:
        raise DataError(f"power = {wrong[0]} must lie in 0..1: 0 only rotates, 1 whitens")
    mean, variances, axes = principal_axes(train.features, dims, some)
    if floor is None:
        floor = floor_for(variances, len(train.ids if some is None else some))
        if floor > FLOOR:
            few = f"{len(train.ids):,} rows are few for {len(mean):,} features"
            added = f"{floor:.2g} of the mean variance is added to each direction"
            say(f"{few}, so they are flattened less: {added}")
    spread = (variances.clamp_min(0) + floor * variances.mean()).sqrt()
    carries = spread > 1e-10 * spread.max()  # an axis without variance and floor carries nothing
    kept = slice(len(mean) - (dims or len(mean)), None)  # variances ascend
    scales = [torch.where(carries, spread**-power, torch.zeros_like(spread)) for power in powers]
    return [Whitening(mean, (axes * scale)[:, kept].contiguous()) for scale in scales]


def floor_for(variances: Tensor, rows: int) -> float:
    """Return FLOOR, or what shrinks a spectrum (F,) of few rows towards one that is flat.

    (1 - rho) S + rho mean(S) I is S with the floor rho / (1 - rho), but for a factor.

    Source:
        Chen, Wiesel, Eldar and Hero 2010, arXiv:0907.4698, eq. 23: the oracle approximating
        shrinkage rho, without its terms of 2 / F, as in scikit-learn.
    """
    count = len(variances)
    total = float(variances.sum())
    squares = float(variances.square().sum())
    apart = squares - total**2 / count  # 0 where it is flat already
    if count < 2 or apart <= 1e-12 * squares:
        return FLOOR
    rho = min((squares + total**2) / ((rows + 1) * apart), MOST_SHRUNK)
    return max(FLOOR, rho / (1 - rho))


def principal_axes(
    features: Tensor, dims: int | None = None, some: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mean (F,), variances (F,) ascending and axes (F, F) in columns, in float64.

    `some` are numbers of rows, of which alone they are. Of few rows the singular value
    decomposition takes a small share of the time that the covariance's eigenvectors take.
    """
    if dims is not None and not 1 <= dims <= features.shape[1]:
        raise DataError(f"dims = {dims} must lie in 1..{features.shape[1]}, the features")
    some = torch.arange(len(features), device=features.device) if some is None else some
    count = len(some)
    parts = torch.split(some, part_rows(features))
    mean = torch.stack([features[part].double().sum(dim=0) for part in parts]).sum(dim=0) / count
    if 2 * count <= len(mean):
        _, spreads, axes = torch.linalg.svd(features[some].double().sub_(mean))  # axes in rows
        variances = mean.new_zeros(len(mean))  # 0: the axes that no row has a part in
        variances[:count] = spreads.square() / count
        return mean, variances.flip(0), axes.T.flip(1)
    covariance = mean.new_zeros(len(mean), len(mean))
    for part in parts:
        centred = features[part].double().sub_(mean)
        covariance += (centred.T @ centred).div_(count)  # (F, F)
        del centred  # as large as the covariance
    variances, axes = torch.linalg.eigh(covariance)
    return mean, variances, axes


def part_rows(features: Tensor) -> int:
    """Count the rows that are converted to float64 at a time."""
    return min(16384, max(1024, PART_NUMBERS // max(1, features.shape[1])))


def beside_whitening(path: Path, sha256: str) -> Path:
    """Return where a whitening lies until it takes the place of the file at `path`."""
    return path.with_name(f"{path.stem}-{sha256[:16]}{path.suffix}")


def load_whitening(path: Path, sha256: str) -> Whitening:
    """Read the whitening of an export, also where `sslpipe whiten` was stopped as it put it there.

    `sha256` is the file's own, or that of the one beside it; without such a file, a ValueError.
    """
    for file in (path, beside_whitening(path, sha256)):
        raw = file.read_bytes() if file.is_file() else b""
        if hashlib.sha256(raw).hexdigest() == sha256:
            return Whitening(**load(raw))
    raise ValueError(f"{path.name} is not the file that config.json names")


def whiten(
    fit_on: Embeddings,
    *others: Embeddings,
    power: float = 1.0,
    in_place: bool = False,
) -> list[Embeddings]:
    """Whiten `fit_on` and the others, in their memory or anew, by `fit_whitening` of `fit_on`."""
    whitening = fit_whitening(fit_on, power=power)
    return [whitening(rows, in_place=in_place) for rows in (fit_on, *others)]
