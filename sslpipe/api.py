"""Trainings and features from Python, in one call each: what a command does, a notebook can."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from sslpipe.arguments import checked
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.data.reader import Quarantined
from sslpipe.distributed import pick_device
from sslpipe.errors import UserError, as_output, as_path, check_count
from sslpipe.evaluation.embed import Embeddings, EmbedOptions, SplitEmbeddings
from sslpipe.evaluation.embed import embed as embed_split
from sslpipe.evaluation.embed_file import embed_to_file
from sslpipe.evaluation.feature_files import features_file, load_embeddings
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.export.model import Picture
from sslpipe.export.named import open_init
from sslpipe.kinds import run_kind
from sslpipe.models.state import torch_as_it_starts
from sslpipe.portable import write_atomically
from sslpipe.recipe.reading import Overrides, load_recipe
from sslpipe.recipe.sections import RunRecipe
from sslpipe.registry.plugins import made_with
from sslpipe.run.checkpoint_files import check_same_data, damage_of, newest, read_state
from sslpipe.run.console import say_last
from sslpipe.run.contract import Plan
from sslpipe.run.description import plugins_of
from sslpipe.run.launcher import launched_processes
from sslpipe.run.recorded import check_run, load_recipe_or_run, report_file, start_of
from sslpipe.run.stop import reported_refusal

if TYPE_CHECKING:
    from sslpipe.check.outcome import Check
    from sslpipe.evaluation.vectors import Features


# what `FrozenBackbone.encode` takes, but for the path of one image, which may be a data set
Images = Sequence[Picture] | NDArray[Any] | Tensor | bytes | Image.Image


@checked
@torch_as_it_starts()
def train(
    recipe: RunRecipe | str | Path,
    data: DatasetIndex | str | Path,
    run_dir: str | Path,
    *,
    init: nn.Module | str | Path | None = None,
    checkpoint: str | None = None,
    overrides: Overrides = (),
) -> int:
    """Pretrain or, with a recipe that has a [sampler], fine-tune; or resume this run directory.

    Args:
        recipe: A recipe, or the path of a TOML file; its parts of your own are known after
            `sslpipe.load_plugins`.
        data: The data set's index, or the path or URL of its dataset.json.
        run_dir: Where the run lives; the same one resumes.
        init: The weights that the backbone starts from: what `load_backbone` takes, or returns. A
            run that has begun keeps them, and needs none.
        checkpoint: Of a run that `init` names, "step-00000012": this one instead of its newest.
        overrides: As in `load_recipe`, where `recipe` is a path: {"steps": 2000}.

    Returns:
        The last step done: fewer than the recipe's where a stop was requested.

    Raises:
        UserError: For what the user can mend: recipe, data, launch, a directory in use.
    """
    run_dir = as_output(run_dir, "run_dir")
    if not isinstance(recipe, RunRecipe):
        with made_with(plugins_of(run_dir)):
            recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides are for the path of a recipe, and this is a recipe already")
    index = load_index(data)
    with reported_refusal(run_dir):
        try:
            plan = plan_from(recipe, index, init, checkpoint=checkpoint, run_dir=run_dir)
        except UserError:
            check_same_data(run_dir, index)  # by another one this refusal may be a consequence
            raise
    if plan.start.kind == "random" and is_finished(plan, run_dir):
        steps: int = plan.recipe.total_steps
        say_last(f"{run_dir} is finished: {steps} of {steps} steps; nothing is left to train")
        return steps
    return run_kind(plan.recipe).run(plan, run_dir)


@checked
def embed(
    model: nn.Module | str | Path,
    data: DatasetIndex | str | Path | Images,
    split: str | None = None,
    *,
    out: str | Path | None = None,
    device: str = "auto",
    batch_size: int = 256,
    num_workers: int = 2,
) -> Embeddings:
    """Compute the features of a split, as `sslpipe embed` does, or of images.

    >>> train = sslpipe.embed("out/backbone", "out/photos/dataset.json", "train")
    >>> test = sslpipe.embed("out/backbone", "out/photos/dataset.json", "test")
    >>> print(sslpipe.knn(train.features, train.labels, test.features, test.labels))
    >>> photos = sslpipe.embed("out/backbone", sorted(Path("MY_PHOTOS").rglob("*.jpg")))

    Args:
        model: What `load_backbone` takes, or returns; it is not moved.
        data: The data set's index, or the path or URL of its dataset.json. Or images, as `encode`
            of a backbone takes them: a list of paths, PIL images or arrays, an array or a tensor.
        split: Its name; None: "test". Images have none.
        out: Also write them into this file, .safetensors or .npz, for `ImageSearch`, a report or
            later; after a stop the same call resumes. Of a split.
        device: Where to compute: "auto", "cpu", "cuda" or "mps".
        batch_size: Samples of a split at a time.
        num_workers: Threads that decode the samples of a split.

    Returns:
        features (N, F) float32 on the CPU, flattened where the export is; labels (N,), -1 for
        none; ids (N,) in the split, or places in the list. What cannot be decoded has no row, and
        is warned of. Of a split they know its name, for calls that take features with `data`.

    Raises:
        UserError: The model, the data set or the device cannot be had, or they do not fit.
    """
    target = pick_device(device, f"device = {device!r}")
    check_count(batch_size, "batch_size")
    check_count(num_workers, "num_workers", least=0)
    if isinstance(data, list | tuple | np.ndarray | Tensor | bytes | Image.Image):
        for argument, value in (("split", split), ("out", out)):
            if value is not None:
                raise UserError(
                    f"{argument} = {str(value)!r} is of a data set, and these are images; omit it"
                )
        return _embed_images(load_backbone(model), data, target)
    if not isinstance(data, DatasetIndex | str | Path):
        raise UserError(
            f"embed takes a data set (its index, or the path of its dataset.json) or images (a "
            f"list of paths, PIL images or arrays), not a {type(data).__name__}; of a torch "
            "Dataset embed lists of images, such as [dataset[i][0] for i in range(64)]"
        )
    index = load_index(data)
    split = "test" if split is None else split
    backbone = load_backbone(model)
    fitting, (rows,) = backbone.matched(index.split(split))

    def warn(bad: Quarantined) -> None:
        warnings.warn(f"{split} has no row for {bad.key!r}: {bad.reason}", stacklevel=2)

    network = fitting.backbone if target == "cpu" else copy.deepcopy(fitting.backbone)
    network = network.to(target)
    options = EmbedOptions(
        device=target, batch_size=batch_size, num_workers=num_workers, on_bad=warn
    )
    facts = fitting.features_metadata(rows)
    if out is not None:
        file = features_file(out)
        embed_to_file(
            out=file,
            backbone=network,
            view=fitting.view,
            split=rows,
            facts=facts,
            options=options,
            network=fitting.name,
            whitening=fitting.whitening,
        )
        written, metadata = load_embeddings(file)
        return SplitEmbeddings.of(written, metadata)
    features = embed_split(network, fitting.view, rows, options, network=fitting.name)
    if fitting.whitening is not None:
        features = fitting.whitening(features)
    return SplitEmbeddings.of(features, facts)


def _embed_images(model: FrozenBackbone, images: Images, device: str) -> Embeddings:
    """Compute features of images, numbered by their places; what cannot be decoded is warned of."""
    skipped: list[int] = []

    def warn(place: int, reason: str) -> None:
        skipped.append(place)
        warnings.warn(f"images[{place}] has no row: {reason}", stacklevel=8)

    network = model if device == "cpu" else copy.deepcopy(model).to(device)
    features = network.encode(images, on_bad=warn).cpu()
    places = torch.arange(len(features) + len(skipped))
    ids = places[~torch.isin(places, torch.tensor(skipped, dtype=torch.int64))]
    return Embeddings(features, torch.full_like(ids, -1), ids)


@checked
def check_recipe(
    recipe: RunRecipe | str | Path,
    data: DatasetIndex | str | Path,
    *,
    init: nn.Module | str | Path | None = None,
    checkpoint: str | None = None,
    overrides: Overrides = (),
) -> Check:
    """Return what a run will do and take, as `sslpipe check` prints; nothing is trained or written.

    >>> check = sslpipe.check_recipe("recipe.toml", "out/photos", overrides={"steps": 2000})
    >>> print(check.rows, check.warnings)

    Args:
        recipe: A recipe, the path of a TOML file, or a run, for the recipe that it was trained by.
        data: The data set's index, or the path or URL of its dataset.json.
        init: The weights that the backbone starts from, as in `train`.
        checkpoint: As in `train`.
        overrides: As in `load_recipe`, where `recipe` is a path: {"steps": 2000}.

    Returns:
        Times, sizes and warnings; `rich.print(check.render())` shows the tables of the command.

    Raises:
        UserError: The recipe cannot be trained on these data, or not on this machine.
    """
    plan = _plan_of(recipe, data, init, checkpoint=checkpoint, overrides=overrides)
    return run_kind(plan.recipe).check(plan)


@checked
def preview(
    recipe: RunRecipe | str | Path,
    data: DatasetIndex | str | Path,
    *,
    images: int = 8,
    ids: Sequence[int] | None = None,
    epoch: int | None = None,
    init: nn.Module | str | Path | None = None,
    checkpoint: str | None = None,
    overrides: Overrides = (),
) -> Image.Image:
    """Draw images beside the views that training makes of them, as `sslpipe preview` does.

    >>> sslpipe.preview("recipe.toml", "out/photos", images=4)  # a notebook shows it

    Args:
        recipe: A recipe, the path of a TOML file, or a run, for the recipe that it was trained by.
        data: The data set's index, or the path or URL of its dataset.json.
        images: How many, at most.
        ids: These samples instead.
        epoch: Whose views are shown, alone; None: those of the first two.
        init: The weights that the backbone starts from, as in `train`.
        checkpoint: As in `train`.
        overrides: As in `load_recipe`, where `recipe` is a path: {"steps": 2000}.

    Returns:
        The picture; `.save("views.png")` writes it.

    Raises:
        UserError: The recipe cannot be trained on these data.
    """
    from sslpipe.planning.pictures import preview as draw

    check_count(images, "images")
    if epoch is not None:
        check_count(epoch, "epoch", least=0)
    plan = _plan_of(recipe, data, init, checkpoint=checkpoint, overrides=overrides)
    grid, _ = draw(plan, images=images, ids=ids, epoch=epoch)
    return grid


def _plan_of(
    recipe: RunRecipe | str | Path,
    data: DatasetIndex | str | Path,
    init: nn.Module | str | Path | None,
    *,
    checkpoint: str | None,
    overrides: Overrides,
) -> Plan[Any]:
    """Make the plan of a recipe, or of that of a file or of a run, and of the run's start."""
    if not isinstance(recipe, RunRecipe):
        path = as_path(recipe, "recipe")
        recipe = load_recipe_or_run(path, overrides)
        init = start_of(path, init)
    elif overrides:
        raise UserError("overrides are for the path of a recipe, and this is a recipe already")
    return plan_from(recipe, load_index(data), init, checkpoint=checkpoint)


def plan_from(
    recipe: RunRecipe,
    index: DatasetIndex,
    init: nn.Module | str | Path | None = None,
    *,
    checkpoint: str | None = None,
    run_dir: Path | None = None,
) -> Plan[Any]:
    """Make the plan of a run of any kind that starts from these weights, or those that it keeps."""
    index.split(recipe.data.split)  # an unknown one is refused before weights are read
    named = open_init(recipe, init, checkpoint=checkpoint, run_dir=run_dir)
    return run_kind(recipe).make(recipe, index, named, run_dir)


def fitting_settings(
    path: Path, overrides: Sequence[str], index: DatasetIndex, *, from_weights: bool
) -> str:
    """Return overrides without which a data set is too small for a recipe, or nothing is held out.

    "": it fits.
    """
    try:
        recipe = load_recipe(path, overrides)
        start = {"init": "weights"} if from_weights else {}  # which hold some images out
        run_kind(recipe).order(recipe.model_copy(update=start), index)
    except UserError as error:  # `check` says it, too
        return error.settings
    return ""


def is_finished(plan: Plan[Any], run_dir: Path) -> bool:
    """Return whether a run is surely DONE by this plan; then no network needs to be built.

    The training itself judges several processes, a damaged run, and one of other settings.
    """
    if not (run_dir / "DONE").is_file() or launched_processes() > 1:
        return False
    last = newest(run_dir)
    if last is None or damage_of(last) is not None:
        return False
    state = read_state(last)
    same = bool(state.identity.digest == plan.identity()["digest"])
    return same and state.step == plan.recipe.total_steps


@checked
def write_report(
    run_dirs: str | Path | Sequence[str | Path],
    data: DatasetIndex | str | Path | None = None,
    out: str | Path | None = None,
    *,
    say: Callable[[str], None] | None = None,
    stage: Callable[[str], None] | None = None,
) -> Path:
    """Show a run, or several side by side, in one HTML file, as `sslpipe report` does.

    Args:
        run_dirs: A run directory, or several.
        data: The data set that was evaluated, to show its images; for one run.
        out: The file; None: report.html in the run, of several comparison.html beside the first.
        say: Called with what could not be shown; None: nobody is.
        stage: Called with the section that comes next; None: nobody is.

    Returns:
        The file.

    Raises:
        UserError: A folder is no run, or named twice; the features are of another data set.
    """
    from sslpipe.report.compare import build_comparison, names_apart
    from sslpipe.report.run_files import read_run

    say = say or (lambda text: None)
    stage = stage or (lambda text: None)
    sources = run_dirs if isinstance(run_dirs, list | tuple) else [run_dirs]
    if not sources:
        raise UserError("a report needs a run; name one or more")
    folders = [as_path(each, "run_dirs") for each in sources]
    if len(folders) > 1 and data is not None:
        raise UserError("--data is for the report of one run; leave it out")
    for number, each in enumerate(folders):
        check_run(each)
        if each.resolve() in [other.resolve() for other in folders[:number]]:
            raise UserError(f"{each} is named twice; name each run once")
    index = None if data is None else load_index(data)
    target = report_file(folders) if out is None else as_output(out, "out")
    if len(folders) > 1:
        runs = [read_run(each) for each in folders]
        page = build_comparison(dict(zip(names_apart(folders, runs), runs, strict=True)))
    else:
        page = _page_of(folders[0], index, say, stage)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page)
    return target


def _page_of(
    run_dir: Path,
    index: DatasetIndex | None,
    say: Callable[[str], None],
    stage: Callable[[str], None],
) -> str:
    """Build the page of one run, with the images of a data set."""
    from sslpipe.report.run_files import read_run
    from sslpipe.report.run_page import build_page, searched_split, shown_split

    run = read_run(run_dir)
    split = shown_split(run)
    bank = searched_split(run)
    queries = _features_of(run_dir, split)
    others = None if bank == split else _features_of(run_dir, bank)  # None: among themselves
    is_of_index = index is not None and index.has_sha256(run.data["index_sha256"])
    if index is not None and is_of_index and run.views_png is None:
        run = run._replace(views_png=_draw_views(run_dir, index, say))
    return build_page(run=run, index=index, queries=queries, bank=others, say=stage)


def _draw_views(run_dir: Path, index: DatasetIndex, say: Callable[[str], None]) -> bytes | None:
    """Draw the PNG of `sslpipe preview RUN`; None, with the reason said, where that cannot be."""
    from sslpipe.planning.pictures import preview

    try:
        plan = plan_from(load_recipe_or_run(run_dir, []), index, run_dir=run_dir)
        grid, _ = preview(plan)
    except UserError as error:
        say(f"without a picture of the views: {error}")
        return None
    grid.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def _features_of(run_dir: Path, split: str) -> Features | None:
    """Read the features of a split that a run keeps, if any."""
    from sslpipe.evaluation.vectors import open_features

    path = run_dir / "features" / f"{split}.safetensors"
    return open_features(path) if path.is_file() else None
