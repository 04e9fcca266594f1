"""A whole fine-tuning: the same run on any number of processes, resumed exactly, and its result."""

from itertools import count

import pytest
import torch
import torch.nn.functional as F

from sslpipe.augment.eval_view import eval_view_for
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.index import load_index
from sslpipe.errors import RecipeError
from sslpipe.evaluation.embed import EmbedOptions, embed
from sslpipe.export.load import load_backbone, load_run
from sslpipe.export.model_card import hub_card, model_card
from sslpipe.export.write import export_backbone
from sslpipe.metric_learning import near_classes
from sslpipe.metric_learning.classes import untrained_ids, validation_ids
from sslpipe.metric_learning.finetune_parts import build_task
from sslpipe.metric_learning.finetune_plan import with_backbone
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.models.tuning import block_names
from sslpipe.recipe.reading import load_recipe
from sslpipe.report.run_files import read_run
from sslpipe.report.run_page import build_page
from sslpipe.run.checkpoint_files import choose_checkpoint
from sslpipe.run.guard import StepGuard
from sslpipe.run.log import read_metrics
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.finetunes import (
    RECIPE,
    finetune_in_rank,
    finetune_over,
    several_in_rank,
    write_recipe,
)
from tests.helpers.processes import run_processes
from tests.helpers.runs import assert_same_weights, final_weights, kill_over

pytestmark = pytest.mark.usefixtures("proved_here")

# an epoch has 2 steps: from the fifth on, classes come with those nearest to them
NEIGHBOURS = (
    "loss={kind='hierarchical_triplet'}",
    "sampler={classes_per_batch=4, images_per_class=12, buffer=150, neighbours=1, num_streams=2}",
    "steps=6",
)
# name -> overrides: a head; pairs over a queue and two views, with an ID loss; a proxy loss that
# looks at the whole batch, partly frozen; triplets
KINDS = {
    "head": ("optim.clip_norm=1.0",),
    "pairs": (
        "loss={kind='multi_similarity'}",
        "also=[{loss={kind='cosface', scale=8.0}, weight=0.5}]",
        "miner={kind='multi_similarity', epsilon=0.2}",
        "queue.size=40",
        "views=2",
        "sampler.random_images=1",
        "embedding.normalize=false",
    ),
    "proxies": ("loss={kind='proxy_anchor'}", "tune={last_blocks=2, layer_decay=0.5, loss_lr=9.0}"),
    "triplets": ("loss={kind='batch_hard'}", "tune.batchnorm=frozen", "sampler.random_images=1"),
    "neighbours": (*NEIGHBOURS, "run.monitor_steps=6"),
    "depths": ("loss={kind='hdc', shares=[1.0, 0.5]}", "embedding.taps=['1']"),
}
WITHOUT_BACKBONE = RECIPE[: RECIPE.index("[backbone]")] + RECIPE[RECIPE.index("[embedding]") :]
FP64 = ("optim.precision=fp64", "steps=3", "run.monitor_steps=3")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), (40, 3, 60, 25, 72), classes=8)


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    """Kind -> the run directory of one process, and what it saw."""
    folder = tmp_path_factory.mktemp("one")
    recipe = write_recipe(folder)
    jobs = [(str(recipe), str(data), str(folder / k), None, *FP64, *v) for k, v in KINDS.items()]
    [results] = run_processes(several_in_rank, 1, jobs)
    return {kind: (folder / kind, seen) for kind, (_, seen) in zip(KINDS, results, strict=True)}


@pytest.mark.promise(1)
def test_two_processes_change_neither_samples_nor_draws_nor_numbers_nor_weights(
    data, one_process, tmp_path
):
    """Of 13 rows, where a random image joins the 12, they have 6 and 7."""
    recipe = write_recipe(tmp_path)
    jobs = [(str(recipe), str(data), str(tmp_path / k), None, *FP64, *v) for k, v in KINDS.items()]
    ranks = run_processes(several_in_rank, 2, jobs)
    for number, (kind, (run_dir, whole)) in enumerate(one_process.items()):
        for step, (ids, boxes) in enumerate(whole):
            parts = [rank[number][1][step] for rank in ranks]
            assert torch.equal(torch.cat([part[0] for part in parts]), ids)
            views = len(boxes) // len(ids)
            params = [part[1].chunk(views) for part in parts]
            together = torch.cat([view[v] for v in range(views) for view in params])
            assert torch.equal(together, boxes)
        expected, actual = read_metrics(run_dir), read_metrics(tmp_path / kind)
        assert len(actual) == len(expected) == len(whole)
        for a, b in zip(expected, actual, strict=True):
            for key in ("loss", "grad_norm"):
                assert b[key] == pytest.approx(a[key], rel=1e-9), (kind, key)
            assert a.get("active") == b.get("active")
        evals = [read_metrics(folder, "eval")[-1] for folder in (run_dir, tmp_path / kind)]
        assert evals[0]["validation_recall_at_1"] == evals[1]["validation_recall_at_1"]
        # Adam divides by a gradient's size: where that is rounding noise, so is the step
        assert_same_weights(run_dir, tmp_path / kind, rtol=1e-6, atol=1e-9)


def test_active_pairs_and_triplets_are_logged_and_heads_have_none(one_process):
    lines = read_metrics(one_process["pairs"][0])
    assert [line["queue_rows"] for line in lines] == [26, 40, 40]
    assert all(0 < line["active"] <= line["compared"] for line in lines)
    triplets = read_metrics(one_process["triplets"][0])
    assert all(line["compared"] == 12 for line in triplets)  # anchors with a positive: not the 13th
    assert "active" not in read_metrics(one_process["head"][0])[0]


def followed_in_rank(process, bad_step, *arguments):
    """Labels and rows of all ranks that each step taken gave to the means; one rank's views of
    bad_step are NaN. And what the guard keeps a copy of."""
    seen, kept = [], []
    original, start, forward = near_classes.follow_means, StepGuard.__init__, FusedViews.forward
    calls = count()

    def recording(means, rows, labels, **others):
        known = others["seen"]
        before = means.clone(), known.clone()
        original(means=means, rows=rows, labels=labels, **others)
        if (labels < 0).all():  # a skipped step's
            assert torch.equal(means, before[0])
            assert torch.equal(known, before[1])
        else:
            seen.append((labels.clone(), rows.clone()))

    def starting(self, modules, *others, **named):
        start(self, modules, *others, **named)
        kept.extend(name for module in modules for name, _ in module.named_buffers())

    def poisoned(self, batch, **given):
        return forward(self, batch, **given) * (float("nan") if next(calls) == bad_step else 1)

    near_classes.follow_means = recording
    StepGuard.__init__, FusedViews.forward = starting, poisoned
    finetune_in_rank(process, *arguments)  # this process ends with the call
    return seen, kept


def test_the_means_follow_one_process_rows_of_the_steps_that_were_taken(data, tmp_path):
    recipe = write_recipe(tmp_path)
    settings = (*NEIGHBOURS, "views=2", "steps=3", "run.monitor_steps=0", "backbone.widths=[8]")
    runs = [
        run_processes(followed_in_rank, world, 1, str(recipe), str(data),
                      str(tmp_path / str(world)), None, *settings)
        for world in (1, 2)
    ]  # fmt: skip
    [(expected, kept)], ranks = runs
    assert any(name.endswith("running_mean") for name in kept)
    assert not any(name.endswith(("tables", "seen")) for name in kept if "losses" not in name)
    for actual, _ in ranks:
        assert len(expected) == len(actual) == 2
        for (labels, rows), (our_labels, our_rows) in zip(expected, actual, strict=True):
            assert torch.equal(our_labels, labels)
            assert rows.isfinite().all()
            torch.testing.assert_close(our_rows, rows, rtol=1e-2, atol=1e-2)


QUEUE = ("steps=6", "queue={size=40}", "loss={kind='sup_con'}", "views=2", "sampler.num_streams=1")


@pytest.mark.promise(2)
@pytest.mark.parametrize("changes", [QUEUE, NEIGHBOURS], ids=["queue", "neighbours"])
def test_a_killed_and_resumed_run_ends_with_bitwise_the_same_weights(data, tmp_path, changes):
    recipe, names, losses = write_recipe(tmp_path), ("straight", "run"), []
    arguments = (recipe, data, tmp_path / "run", None, *changes)
    kill_over(2, "train.step:5", *arguments, by=finetune_in_rank)
    for name in names:
        done = [last for last, _ in finetune_over(2, recipe, data, tmp_path / name, *changes)]
        assert done == [6, 6]
        losses.append({m["step"]: m["loss"] for m in read_metrics(tmp_path / name)})
    assert_same_weights(*(tmp_path / name for name in names))
    assert losses[0] == losses[1]


def test_the_result_is_a_backbone_that_embeds_at_length_1_without_its_head(
    data, one_process, tmp_path
):
    run_dir, _ = one_process["head"]
    model, split, tensors = load_backbone(run_dir), trained_split(data), final_weights(run_dir)
    assert all(key.startswith("backbone.") for key in tensors)
    rows = embed(model, model.view, split, EmbedOptions(canvas_px=16, num_workers=0)).features
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(200))
    network = build_backbone(small(), crop_px=16)
    prefix = "backbone.network."
    own = {k.removeprefix(prefix): v.float() for k, v in tensors.items() if k.startswith(prefix)}
    network.network.load_state_dict(own)
    view = eval_view_for(16, [0.5] * 3, [0.25] * 3)
    pooled = embed(network, view, split, EmbedOptions(canvas_px=16, num_workers=0)).features
    weight, bias = (tensors[f"backbone.embedding.{name}"].float() for name in ("weight", "bias"))
    expected = F.normalize(pooled @ weight.T + bias, dim=1)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
    page = build_page(read_run(run_dir), None, None, None)
    assert "12 images" in page  # 4 classes x 3
    assert "held-out Recall@1" in page
    export_backbone(run_dir, tmp_path / "out", ["safetensors"])
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(load_backbone(tmp_path / "out").encode(images), model.encode(images))


def test_branches_at_several_depths_are_kept_in_the_run_and_its_export(one_process, tmp_path):
    run_dir, _ = one_process["depths"]
    model = load_backbone(run_dir)
    assert model.backbone.taps == ("1",)
    export_backbone(run_dir, tmp_path / "out", ["safetensors"])
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    features = model.encode(images)
    assert features.shape == (3, 8)
    assert torch.equal(load_backbone(tmp_path / "out").encode(images), features)


def test_the_card_names_losses_miner_queue_batches_classes_and_lengths(data, one_process):
    split, held = trained_split(data), held_out(data)
    labels = sorted(set(split.labels.tolist()) - set(split.labels[held].tolist()))
    for kind, lines in {
        "head": (
            "fine-tuned with labels by metric learning",
            "8 features out, of length 1",
            "| loss | `arcface` (focal_gamma = 0.0, scale = 8.0, margin = 0.5, "
            "beyond = 'linear') |",
            "| batches | 4 classes x 3 images |",
            f"| classes seen | 6: {', '.join(f'class {label}' for label in labels)} |",
            "| started from | random weights |",
        ),
        "pairs": (
            "8 features out, not normalised",
            "features  # not normalised",
            "| loss | `multi_similarity` (normalize = True, reduction = 'mean', alpha = 2.0, "
            "beta = 50.0, base = 1.0) + 0.5 x `cosface` (focal_gamma = 0.0, scale = 8.0, "
            "margin = 0.35) |",
            "| miner | `multi_similarity` (epsilon = 0.2) |",
            "| queue | 40 embeddings of past batches |",
            "| batches | 4 classes x 3 images and 1 of other classes, 2 views each |",
        ),
    }.items():
        config = load_backbone(one_process[kind][0]).config.model_dump(mode="json")
        card = model_card(config, {"ours": "features  # not normalised"} if kind == "pairs" else {})
        assert not [line for line in lines if line not in card], card
        assert ("not normalised" in card) == (kind == "pairs")
        hub = hub_card(config, "", library="sslpipe")
        assert "metric-learning" in hub
        assert "self-supervised" not in card + hub


def trained_split(data):
    return load_index(data).split("train")


def held_out(data):
    return validation_ids(trained_split(data), 2, load_index(data).manifest.classes)


def small():
    return backbone_settings("small_resnet", {"widths": [8, 16]})


@pytest.fixture(scope="module")
def pretrained(one_process):
    """Any run directory or export does: this one has an embedding layer, too."""
    return one_process["head"][0]


def test_a_pretrained_backbone_is_where_training_starts_and_frozen_layers_stay(
    data, pretrained, tmp_path
):
    recipe = write_recipe(tmp_path, WITHOUT_BACKBONE)
    changes = ("steps=2", "tune.last_blocks=1", "run.monitor_steps=0")
    finetune_over(1, recipe, data, tmp_path / "run", *changes, backbone=pretrained)
    before, after = load_backbone(pretrained).backbone, load_backbone(tmp_path / "run").backbone
    names, theirs = block_names(before.network), dict(after.state_dict())
    changed = {k for k, value in before.state_dict().items() if not torch.equal(theirs[k], value)}
    trained = (f"network.{names[-1]}.", "embedding.")
    assert {key for key in changed if key.endswith(".weight")}
    assert all(key.startswith(trained) for key in changed)  # statistics, too
    for key in trained:  # and the first step, whose rate is the peak's, moved it only so far
        far = max(float((theirs[k] - v).abs().max()) for k, v in before.state_dict().items()
                  if k.startswith(key) and k.endswith(("weight", "bias")))  # fmt: skip
        assert 0 < far <= 2 * 0.0101  # Adam's steps: two, of at most the rate
    card = model_card(load_backbone(tmp_path / "run").config.model_dump(mode="json"), {})
    sha256 = load_backbone(pretrained).config.weights_sha256
    assert f"| started from | weights with sha256 `{sha256[:16]}" in card
    (again,) = finetune_over(1, recipe, data, tmp_path / "run", *changes)  # it keeps its start
    assert again == (2, [])
    with pytest.raises(AssertionError, match=r"started from weights with sha256 .* names others"):
        finetune_over(1, recipe, data, tmp_path / "run", *changes, backbone=tmp_path / "run")


def test_what_cannot_work_is_one_error_before_the_first_step(data, pretrained, tmp_path):
    index, given = load_index(data), load_backbone(pretrained)

    def recipe(*overrides, text=RECIPE):
        return load_recipe(write_recipe(tmp_path, text), overrides)

    for attempt, text in (
        (
            lambda: with_backbone(recipe(text=WITHOUT_BACKBONE), None, index),
            "weights to start .* with init",
        ),
        (
            lambda: with_backbone(recipe("backbone.widths=[4, 4]"), given, index),
            r"\[8, 16\]; leave",
        ),
        (
            lambda: with_backbone(recipe("init=abc"), given, index),
            "give the one that the recipe was made",
        ),
        (lambda: recipe("queue.size=5"), "queue.size = 5 holds less than one batch of 12 rows"),
        (lambda: recipe("sampler.neighbours=2"), "groups of 3, which do not divide .* use 3"),
        (lambda: recipe("sampler.clases_per_batch=5"), "did you mean 'classes_per_batch'"),
        (lambda: recipe("tune={backbone='frozen', last_blocks=1}"), "leave one of them out"),
        (
            lambda: build_task(with_backbone(recipe("queue.size=99"), given, index), 16, given, 6),
            r"'arcface' compares rows with weights, so \[queue\] has nothing to do",
        ),
        (
            lambda: build_task(
                with_backbone(recipe("embedding.taps=['1']", "loss={kind='hdc'}"), given, index),
                *(16, given, 6),
            ),
            r"2 branches, and loss\.shares = .* are of 3",
        ),
        (
            lambda: recipe("loss.scal=9"),
            "unknown key loss.scal; did you mean 'scale'",
        ),
        (
            lambda: validation_ids(
                index.split("train"), ("class 1", "clas 2"), index.manifest.classes
            ),
            "did you mean 'class 2'",
        ),
        (lambda: validation_ids(index.split("train"), 8, ()), "leaves no class to train on"),
    ):
        with pytest.raises(RecipeError, match=text):
            attempt()


def test_groups_of_validation_classes_are_not_trained_on(tmp_path):
    manifest = write_dataset(tmp_path / "data", classes=6)
    patients = [k % 11 for k in range(128)]  # each has several classes
    patients[5:40] = [None] * 35
    index = add_columns(manifest, patient=patients)
    one, path = ("data.validation_classes=1",), write_recipe(tmp_path)
    recipe = load_recipe(path, one)
    by_patient = load_recipe(path, (*one, "data.holdout_by=patient"))
    held = validation_ids(index.split("train"), 1, index.manifest.classes)
    labelled = (index.split("train"), index.manifest.classes)
    assert untrained_ids(recipe, *labelled).tolist() == held.tolist()
    theirs = {patients[k] for k in held} - {None}
    expected = [k for k in range(128) if k in set(held.tolist()) or patients[k] in theirs]
    assert untrained_ids(by_patient, *labelled).tolist() == expected
    with pytest.raises(RecipeError, match=r"holdout_by = 'patient' needs data.validation_classes"):
        load_recipe(path, ("data.validation_classes=0", "data.holdout_by=patient"))


def test_validation_classes_are_whole(data):
    split, names, held = trained_split(data), load_index(data).manifest.classes, held_out(data)
    classes = set(split.labels[held].tolist())
    assert len(classes) == 2
    assert set(held.tolist()) == {i for i, y in enumerate(split.labels) if y in classes}
    assert set(validation_ids(split, 1, names).tolist()) < set(held.tolist())  # a fixed shuffle
    named = validation_ids(split, ("class 3", "class 5"), names)
    assert set(split.labels[named].tolist()) == {3, 5}


@pytest.mark.promise(15)
def test_a_fine_tuning_keeps_its_best_checkpoint(data, tmp_path):
    recipe, run_dir = write_recipe(tmp_path), tmp_path / "run"
    settings = ("steps=6", "run.save_steps=2", "run.keep_checkpoints=9")
    settings += ("run.monitor_steps=2", "run.keep=best")
    finetune_over(2, recipe, data, run_dir, *settings)
    scores = {line["step"]: line["validation_map_at_r"] for line in read_metrics(run_dir, "eval")}
    step = next(key for key, value in scores.items() if value == max(scores.values()))
    assert choose_checkpoint(run_dir, "best").folder.name == f"step-{step:08d}"
    best = load_run(run_dir, checkpoint="best")
    assert best.config.facts["step"] == step
    assert best.backbone.embedding is not None
