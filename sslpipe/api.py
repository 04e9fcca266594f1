"""Trainings and features from Python, in one call each: what a command does, a notebook can."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.data.reader import Quarantined
from sslpipe.distributed import pick_device
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.embed import embed as embed_split
from sslpipe.export.load import FrozenBackbone, Weights, load_backbone
from sslpipe.export.named import open_init
from sslpipe.kinds import kind_of
from sslpipe.plan import Pretraining
from sslpipe.recipe import Recipe, RunRecipe, load_recipe
from sslpipe.registry.plugins import made_with
from sslpipe.run.checkpoint_files import damage_of, newest, read_state
from sslpipe.run.console import say_last
from sslpipe.run.launcher import launched_processes
from sslpipe.run.plan import Plan
from sslpipe.run.records import plugins_of
from sslpipe.run.stop import reported_refusal


def train(
    recipe: RunRecipe | str | Path,
    data: DatasetIndex | str | Path,
    run_dir: str | Path,
    *,
    init: FrozenBackbone | str | Path | None = None,
    checkpoint: str | None = None,
    weights: Weights | None = None,
    overrides: Sequence[str] = (),
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
        weights: Of a run that `init` names: "trained" or "ema", see `load_run`.
        overrides: `section.key=value`, where `recipe` is a path.

    Returns:
        The last step done: fewer than the recipe's where a stop was requested.

    Raises:
        UserError: For what the user can mend: recipe, data, launch, a directory in use.
    """
    if isinstance(recipe, str | Path):
        with made_with(plugins_of(Path(run_dir))):
            recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides are for the path of a recipe, and this is a recipe already")
    run_dir = Path(run_dir)
    index = data if isinstance(data, DatasetIndex) else load_index(str(data))
    with reported_refusal(run_dir):
        named = open_init(recipe, init, checkpoint=checkpoint, weights=weights, run_dir=run_dir)
        plan = make_plan(recipe, index, named, run_dir)
    if plan.start.kind == "random" and is_finished(plan, run_dir):
        steps: int = plan.recipe.total_steps
        say_last(f"{run_dir} is finished: {steps} of {steps} steps; nothing is left to train")
        return steps
    if isinstance(plan, Pretraining):
        from sslpipe.pretrain import pretrain

        return pretrain(plan, run_dir)
    return kind_of(plan.recipe).run(plan, run_dir)


def embed(
    model: FrozenBackbone | str | Path,
    data: DatasetIndex | str | Path,
    split: str = "test",
    *,
    device: str = "auto",
    batch_size: int = 256,
    num_workers: int = 2,
) -> Embeddings:
    """Compute the features of a split, as `sslpipe embed` does.

    >>> train = sslpipe.embed("out/backbone", "out/photos/dataset.json", "train")
    >>> test = sslpipe.embed("out/backbone", "out/photos/dataset.json", "test")
    >>> print(sslpipe.knn(train.features, train.labels, test.features, test.labels))

    Args:
        model: What `load_backbone` takes, or returns; it is not moved.
        data: The data set's index, or the path or URL of its dataset.json.
        split: Its name.
        device: Where to compute: "auto", "cpu", "cuda" or "mps".
        batch_size: Samples at a time.
        num_workers: Threads that decode.

    Returns:
        features (N, F) float32 on the CPU, flattened where the export is; labels (N,), -1 for
        none; ids (N,) in the split. Samples that cannot be decoded have no row, and are warned of.

    Raises:
        UserError: The model, the data set or the device cannot be had, or they do not fit.
    """
    index = data if isinstance(data, DatasetIndex) else load_index(str(data))
    backbone = load_backbone(model)
    target = pick_device(device, f"device = {device!r}")
    fitting, (rows,) = backbone.matched(index.split(split))

    def warn(bad: Quarantined) -> None:
        warnings.warn(f"{split} has no row for {bad.key!r}: {bad.reason}", stacklevel=2)

    network = fitting.backbone if target == "cpu" else copy.deepcopy(fitting.backbone)
    features = embed_split(
        network.to(target),
        fitting.view,
        rows,
        device=target,
        network=fitting.name,
        batch_size=batch_size,
        canvas_px=fitting.view.canvas_px,
        num_workers=num_workers,
        on_bad=warn,
    )
    return features if fitting.whitening is None else fitting.whitening(features)


def make_plan(
    recipe: RunRecipe,
    index: DatasetIndex,
    named: FrozenBackbone | None = None,
    run_dir: Path | None = None,
) -> Plan[Any]:
    """Make the plan of a run of any kind: see `sslpipe.plan.Pretraining.make`."""
    if type(recipe) is Recipe:
        return Pretraining.make(recipe, index, named, run_dir)
    return kind_of(recipe).make(recipe, index, named, run_dir)


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
