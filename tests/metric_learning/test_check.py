"""`sslpipe check` of a fine-tuning says what the run then does, and refuses what it refuses."""

import json
import re
import time
from itertools import product

import pytest
import torch

from sslpipe.api import train
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.export.load import load_backbone
from sslpipe.export.named import open_init
from sslpipe.metric_learning.check import check_finetuning
from sslpipe.metric_learning.finetune_plan import Finetuning
from sslpipe.models.backbones import Backbone
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.log import read_metrics
from tests.helpers.columns import add_columns
from tests.helpers.dataset import write_dataset
from tests.helpers.finetunes import RECIPE, write_recipe
from tests.helpers.runs import ROOT, command_line, final_weights


def rows_of(check):
    """All that a check prints, by name; the later of two rows of a name."""
    return dict(check.rows + check.details)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), (40, 60, 72), classes=8)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(load_recipe(write_recipe(folder)), load_index(data), folder / "run", init=None)
    return folder / "run"


def checked(tmp_path, data, *overrides, given=None):
    recipe = load_recipe(write_recipe(tmp_path), overrides)
    return check_finetuning(Finetuning.make(recipe, load_index(data), given))


def numbers_of(result):
    """Parameters of the backbone, of losses, and those trained."""
    names = ("parameters", "parameters of losses", "parameters trained")
    texts = (rows_of(result)[name].removeprefix("backbone ") for name in names)
    return [int(text.replace(",", "")) for text in texts]


def test_what_is_checked_is_the_run(tmp_path, data, trained):
    result = checked(tmp_path, data)
    lines = read_metrics(trained)
    rows = rows_of(result)
    assert rows["steps per epoch"] == str(round(lines[-1]["step"] / lines[-1]["epoch"]))
    images, held = re.match(r"tiny: (\d+) images of 6 classes", rows["data"]), rows["validation"]
    assert int(images[1]) + int(held.split()[0]) == 172
    newest = max((trained / "checkpoints").iterdir())
    identity = json.loads((newest / "state.json").read_text())["identity"]
    assert result.digest == rows["digest"] == identity["digest"]
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    weights = final_weights(trained)
    numbers = sum(t.numel() for name, t in weights.items() if not name.endswith(statistics))
    # losses: classes x embedding
    assert numbers_of(result) == [numbers, 48, numbers + 48]
    assert result.recipe.total_steps == 8
    assert rows["batch"] == "4 classes x 3 = 12 images, 1 view each"
    assert rows["embedding"] == "8 features, length 1"


def test_a_check_begins_with_time_memory_and_what_to_watch(tmp_path, data):
    """As for pretraining; the time is that of a step of the whole batch."""
    result = checked(tmp_path, data, "steps=40", "run.monitor_steps=5", "run.keep=best")
    assert [name for name, _ in result.rows][:3] == ["time", "memory", "watch"]
    assert result.step_seconds > 0
    for key in ("43 held-out images", "every 5 steps", "best"):
        assert key in dict(result.rows)["watch"]
    frozen = ("tune.backbone=frozen", "embedding={}", "data.validation_classes=0")
    nothing = checked(tmp_path, data, *frozen)  # only the head is trained: no backward pass
    assert nothing.step_seconds > 0
    assert "nothing is held out" in dict(nothing.rows)["watch"]


@pytest.mark.parametrize(("overrides", "images"), [(("views=1",), 12), (("views=2",), 24)])
def test_the_time_is_that_of_all_views_of_a_batch(tmp_path, data, monkeypatch, overrides, images):
    now_s = 0.0
    forward = Backbone.forward

    def timed(self, views):  # an image takes 100 ms
        nonlocal now_s
        now_s += 0.1 * len(views)
        return forward(self, views)

    monkeypatch.setattr(time, "thread_time", lambda: now_s)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(Backbone, "forward", timed)
    result = checked(tmp_path, data, "steps=20", *overrides)
    assert result.step_seconds == pytest.approx(0.1 * images)
    assert dict(result.rows)["time"].startswith(f"{0.1 * images * 20:.0f} s in all")


def test_a_given_backbone_and_frozen_layers_are_counted(tmp_path, data, trained):
    given = load_backbone(trained)
    result = checked(tmp_path, data, "tune.backbone=frozen", "views=2", given=given)
    assert numbers_of(result)[2] == 16 * 8 + 8 + 48  # embedding layer and class weights
    assert given.config.weights_sha256[:16] in rows_of(result)["starts from"]
    named = open_init(load_recipe(write_recipe(tmp_path)), trained)  # as --init names it
    assert str(trained) in rows_of(checked(tmp_path, data, given=named))["starts from"]
    assert len(result.views) == 2
    assert any("warmup" in w for w in checked(tmp_path, data, "optim.warmup_steps=8").warnings)
    settings = ("tune.last_blocks=1", "tune.batchnorm=frozen")
    kept = ("at random weights", "without statistics")
    for start, said in ((None, 1), (given, 0)):
        warnings = checked(tmp_path, data, *settings, given=start).warnings
        assert [sum(text in each for each in warnings) for text in kept] == [said, said]
    small = checked(tmp_path, data, "data.validation_classes=0", "run.monitor_steps=5")
    assert any("validation_classes = 0 holds nothing out" in text for text in small.warnings)
    few = checked(tmp_path, data, "sampler={classes_per_batch=6, images_per_class=12, buffer=144}")
    assert dict(few.rows)["an epoch uses"] == "72 of 129 images"
    assert any("an epoch uses 72 of" in warning for warning in few.warnings)


@pytest.mark.parametrize(
    ("classes", "batch", "said", "remedy"),
    [(24, 6, False, False), (6, 4, True, True), (6, 5, True, False), (3, 3, True, False)],
)
def test_a_watch_that_sees_no_new_class_says_so(tmp_path, classes, batch, said, remedy):
    data = write_dataset(tmp_path, (240,), classes=classes)
    batch = f"sampler={{classes_per_batch={batch},images_per_class=4,buffer=96}}"
    result = checked(tmp_path, data, "data.validation_classes=auto", batch)
    texts = [text for text in result.warnings if "of the classes that are trained on" in text]
    assert len(texts) == said
    assert any("set data.validation_classes=2," in text for text in texts) == remedy
    assert ("classes held out" in dict(result.rows)["validation"]) == (not said)


@pytest.mark.parametrize(("sizes", "skipped", "more"), [((9, 3, 2, 1), 3, 2), ((9, 1), 1, 0)])
def test_classes_too_small_for_a_batch_are_counted_with_those_that_need_not_be(
    tmp_path, sizes, skipped, more
):
    """Four classes of nine images, and one of each further size."""
    data = write_dataset(tmp_path / "data", (60,))
    values = [k for k, size in enumerate((9, 9, 9, *sizes)) for _ in range(size)]
    add_columns(data, kind=values + [None] * (60 - len(values)))
    settings = ("sampler.column=kind", "data.validation_classes=0", "run.keep=last")
    result = checked(tmp_path, data, *settings, "sampler.images_per_class=4")
    (text,) = [text for text in result.warnings if "are skipped" in text]
    assert text.startswith(f"{skipped} classes")
    taken = [words for words in text.split("; ") if "images_per_class = 2" in words]
    assert [f" {more} " in words for words in taken] == [True] * bool(more)


def planned(tmp_path, index, *overrides):
    """The plan with so many settings of the sampler, or the error."""
    try:
        return Finetuning.make(load_recipe(write_recipe(tmp_path), overrides), index, None)
    except UserError as error:
        return error


@pytest.mark.parametrize(
    "sizes",
    [(4,) * 12 + (3,) * 14 + (2,) * 12, (20,) * 6, (9, 9, 9, 3, 2), (30, 3, 3, 3, 3, 3, 3, 3)],
)
def test_the_batch_that_is_named_where_another_does_not_fit_is_the_largest(tmp_path, sizes):
    """By a plan of each number of classes and images, of groups of 2."""
    data = write_dataset(tmp_path / "data", (sum(sizes),), px=2)
    values = [f"k{k}" for k, size in enumerate(sizes) for _ in range(size)]
    index = add_columns(data, kind=values)
    given = ["sampler={column='kind',buffer=400,neighbours=1}", "run.keep=last"]
    asked = ["sampler.classes_per_batch=16", "sampler.images_per_class=4"]
    refused = planned(tmp_path, index, *given, *asked)
    assert isinstance(refused, UserError)
    named = planned(tmp_path, index, *given, *asked, *refused.settings.split())
    fitting = []
    for classes, images in product(range(2, 33, 2), (2, 3, 4)):
        if classes * images > 16 * 4:
            continue
        sampler = (f"sampler.classes_per_batch={classes}", f"sampler.images_per_class={images}")
        other = planned(tmp_path, index, *given, *sampler)
        if isinstance(other, Finetuning):
            fitting.append((other.order.batch_size, other.order.samples))
    # of equal ones that which trains on most images
    assert (named.order.batch_size, named.order.samples) == max(fitting)


@pytest.mark.parametrize(
    ("classes", "images", "neighbours", "lowered"),
    [
        (6, 12, 0, "classes_per_batch=5"),
        (6, 12, 2, "classes_per_batch=3"),
        (6, 12, 5, "images_per_class=11"),  # one group: fewer classes are none
        (2, 13, 0, "images_per_class=12"),
    ],
)
def test_what_is_to_be_lowered_can_be(tmp_path, data, classes, images, neighbours, lowered):
    sampler = f"classes_per_batch={classes},images_per_class={images},neighbours={neighbours}"
    given = [f"sampler={{{sampler},buffer=172}}", "steps=4"]
    (text,) = [text for text in checked(tmp_path, data, *given).warnings if "epoch uses" in text]
    key = lowered.partition("=")[0]
    assert re.findall(r"lower sampler[.](\w+)", text) == [key]
    assert isinstance(planned(tmp_path, load_index(data), *given, f"sampler.{lowered}"), Finetuning)


def test_what_the_run_would_refuse_is_refused(tmp_path, data):
    for overrides, text in (
        (("loss.kind=arcfase",), "did you mean 'arcface'"),
        (("loss.scal=3",), "did you mean 'scale'"),
        (("sampler.classes_per_batch=7",), "set sampler.classes_per_batch=6"),
        (("tune.backbone=frozen", "embedding={}", "loss={kind='triplet'}"), "nothing is trained"),
        (("optim.precision=fp16", "run.device=cpu"), "needs a CUDA device"),
    ):
        with pytest.raises(UserError, match=text):
            checked(tmp_path, data, *overrides)


def test_the_command_line_checks_either_kind_of_recipe(tmp_path, data, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    recipe = str(write_recipe(tmp_path, RECIPE))
    done = command_line("check", recipe, "--data", str(data), status=0)
    assert "of 6 classes" in done.stdout
    recipe = str(ROOT / "recipes" / "demo.toml")
    done = command_line("check", recipe, "--init", str(tmp_path), status=2)
    assert "is neither an export nor a run" in done.stderr
