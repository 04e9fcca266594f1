"""`sslpipe choose` answers on shards and folders, with labels and without, and says what fails."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

import sslpipe
import sslpipe.evaluation.embed
from sslpipe.api import train
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import load_embeddings
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.export.named import open_init
from sslpipe.recipe.reading import load_recipe
from sslpipe.search.candidates import labels_seen, sample_ids
from sslpipe.search.pages import Cells, choice_page
from sslpipe.search.ranking import SEEN, Ranked, rank_with_labels
from tests.helpers.dataset import write_dataset
from tests.helpers.finetunes import write_recipe
from tests.helpers.runs import forget_accelerator
from tests.search.test_cli_gallery import write_model

pytestmark = pytest.mark.usefixtures("proved_here")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three exports: two random networks, and one whose features are not finite."""
    folders = []
    for seed, name in enumerate(("one", "two", "broken")):
        folder = tmp_path_factory.mktemp(name)
        folders.append(write_model(folder, seed))
    path = folders[2] / "model.safetensors"
    tensors = load_file(path)
    tensors = {k: t * float("nan") if t.is_floating_point() else t for k, t in tensors.items()}
    save_file(tensors, path)
    backbone = load_backbone(folders[0]).backbone
    backbone.load_state_dict(tensors)
    config = json.loads((folders[2] / "config.json").read_text())
    config["weights_sha256"] = sslpipe.evaluation.embed.module_sha256(backbone)
    (folders[2] / "config.json").write_text(json.dumps(config))
    return folders


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """NAME/0.png to 4.png of eight names: a pattern each, with noise."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name in "abcdefgh":
        pattern = rng.integers(0, 90, (5, 6, 3)).repeat(4, 0).repeat(4, 1)
        (folder / name).mkdir()
        for number in range(5):
            noisy = (pattern + rng.integers(0, 160, pattern.shape)).astype(np.uint8)
            Image.fromarray(noisy).save(folder / name / f"{number}.png")
    return folder


def sources(models):
    """The name of each candidate of the test below, and its source."""
    one, two = models[:2]
    first = {f"small_resnet@{px}": f"{one}@{px}" for px in (16, 24)}
    return first | {f"small_resnet@{px} of {two}@{px}": f"{two}@{px}" for px in (16, 24)}


def side_by_side(paths, parts, models):
    """Features of a row of the ranking by `encode` of each of its networks."""
    rows = [load_backbone(sources(models)[part]).encode(paths) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat([F.normalize(each) for each in rows], 1)


def cosines(rows):
    units = F.normalize(rows)
    return units @ units.T


@pytest.mark.promise(14)
def test_a_folder_of_images_is_answered_and_the_named_commands_work(
    call, models, photos, tmp_path, monkeypatch
):
    out = tmp_path / "choice"
    words = ["choose", *models[:2], "--px", 16, "--px", 24, "--data", photos, "--out", out]
    said, errors = call(*words)
    tree = json.loads((out / "choice.json").read_text())
    # two candidates at two sizes, each one's sizes together, and both at the larger: 4 forms each,
    # but 2 where the 40 images that fit a strong flattening would be orthogonal by it
    width = load_backbone(models[0]).num_features
    forms = [4 if len(parts) * width < 40 else 2 for parts in (*"1234", *("12", "34", "13"))]
    assert len(tree["rows"]) == sum(forms)
    strong = {len(row["parts"]) for row in tree["rows"] if (row["power"] or 0) > 0.25}
    assert strong == {len for len in (1, 2) if len * width < 40}
    assert len(said.splitlines()) >= 1 + 7 + 2  # heading, best forms, answer
    (answer,) = [line for line in said.splitlines() if line.startswith("Use ")]
    assert "4 classes that did not choose" in said
    # of few labelled images, where none is clearly better, one network at two sizes
    best = tree["rows"][tree["used"]]
    parts = best["parts"]
    assert "40 labelled images are too few to choose by" in answer
    assert (len(parts), best["power"]) == (2, 0.25)
    assert answer.startswith(f"Use {' + '.join(parts)}, power 0.25:")
    page = (out / "choice.html").read_text()
    assert page.count("<img") > 8 * 8
    assert "✓" in page
    # the row that all are compared with stands in the first table, too
    assert ">best single<" in page.partition("Neighbours</h2>")[0].partition("<table")[2]
    # the best row is a backbone: it finds what its row of the table says
    model = load_backbone(out / "backbone")
    assert (model.whitening is not None) == (best["power"] is not None)
    paths = sorted(photos.rglob("*.png"))
    features = side_by_side(paths, best["parts"], models)
    if best["power"] is not None:
        rows = Embeddings(features, torch.zeros(40).long(), torch.arange(40))
        features = fit_whitening(rows, power=best["power"]).apply(features)
    torch.testing.assert_close(cosines(model.encode(paths)), cosines(features), rtol=0, atol=1e-4)
    assert "warning" not in errors
    # what it names works: features of these images, and a training with their labels
    lines = [line for line in errors.splitlines() if line.startswith("Next")]
    commands = [line.partition("sslpipe ")[2].split() for line in lines]
    assert [command[0] for command in commands] == ["embed", "search", "check"]
    call(*commands[0])
    embedded, _ = load_embeddings(out / "backbone.safetensors")
    (data,) = out.glob("shards-*/dataset.json")
    names = load_index(data).split("train").names_of(embedded.ids)
    order = np.argsort(names)
    assert [str(photos / names[place]) for place in order] == [str(path) for path in paths]
    found = cosines(embedded.features[order])
    torch.testing.assert_close(found, cosines(features), rtol=0, atol=1e-4)
    hits, _ = call(*(str(paths[0]) if word == "QUERY.jpg" else word for word in commands[1]))
    assert paths[0].name in hits
    assert commands[2][commands[2].index("--init") + 1] == str(out)
    single = next(row["parts"][0] for row in tree["rows"] if len(row["parts"]) == 1)
    if len(parts) == 1 or single in parts:  # what training takes is the best of the join's parts
        recipe = load_recipe(write_recipe(tmp_path))
        given = open_init(recipe, out)
        alone = load_backbone(sources(models)[single if len(parts) > 1 else parts[0]])
        assert given.config.weights_sha256 == alone.config.weights_sha256
        assert given.view.crop_px == alone.view.crop_px
    # the same command reads all and embeds nothing
    monkeypatch.setattr(sslpipe.evaluation.embed, "embed", None)
    again, _ = call(*words)
    assert answer in again.splitlines()
    assert json.loads((out / "choice.json").read_text())["rows"] == tree["rows"]
    # and so does the call in Python
    choice = sslpipe.choose(list(models[:2]), photos, out, px=[16, 24], device="cpu")
    assert choice.answer[0] == answer
    assert answer in repr(choice)
    assert choice.best.parts == tuple(parts)
    assert (choice.backbone, choice.page) == (out / "backbone", out / "choice.html")
    assert (choice.by_labels, choice.skipped) == (True, [])
    assert {len(row) for row in choice.rows} == {len(choice.heads)}
    assert choice.best.name in [row[0] for row in choice.rows]
    assert "best single" in [row[4] for row in choice.rows]
    # one command from the choice to a backbone: flattened as the row was
    call("export", out, "--out", tmp_path / "backbone")
    exported = load_backbone(tmp_path / "backbone")
    assert torch.equal(exported.encode(paths), model.encode(paths))
    _, errors = call("export", out, "--out", tmp_path / "timm", "--format", "timm", status=2)
    assert "flattened by `encode`" in errors
    assert "can have safetensors, onnx, pt2" in errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sources": "timm:resnet50"}, r"sources = 'timm:resnet50' is not a list"),
        ({"sources": ["timm:resnet50", 3]}, r"sources\[1\] = 3 is no path"),
        ({"sources": []}, "sources is empty"),
        (
            {"sources": ["none.pth"]},
            r"no candidate can be read: none\.pth .*there is no none\.pth",
        ),
        ({"px": 96}, r"px = 96 is not a list; give \[96\]"),
        ({"device": "tpu"}, "device = 'tpu'"),
        ({"out": 3}, "out = 3 is not a text or a path"),
        ({"data": 3}, r"dataset\.json, not by 3"),
    ],
)
def test_a_wrong_argument_of_choose_is_named(models, photos, tmp_path, given, message):
    usual = {"sources": [models[0]], "data": photos, "out": tmp_path / "out"}
    with pytest.raises(UserError, match=message):
        sslpipe.choose(**{**usual, **given})


def test_a_network_in_memory_is_a_candidate_as_its_export_is(models, photos, tmp_path):
    of_files = sslpipe.choose(models[:2], photos, tmp_path / "files", px=[16])
    network = sslpipe.load_backbone(models[0])
    for _ in range(2):  # written once
        choice = sslpipe.choose([network, models[1]], photos, tmp_path / "memory", px=[16])
        assert [row[1:5] for row in choice.rows] == [row[1:5] for row in of_files.rows]
    (folder,) = (tmp_path / "memory" / "networks").iterdir()
    written = sslpipe.load_backbone(folder).config.weights_sha256
    assert written == network.config.weights_sha256


def test_other_weights_and_other_images_are_embedded_anew(call, models, photos, tmp_path):
    out = tmp_path / "choice"
    call("choose", models[0], "--data", photos, "--out", out)
    assert len(list((out / "features").iterdir())) == 1
    call("choose", models[1], "--data", photos, "--out", out)
    (data,) = out.glob("shards-*/dataset.json")
    call("choose", models[1], "--data", data, "--most", 20, "--out", out)
    files = list((out / "features").iterdir())
    assert len(files) == 3
    assert sorted(len(load_embeddings(file)[0].ids) for file in files) == [20, 40, 40]
    # a damaged file is reported and made again
    before = files[0].read_bytes()
    files[0].write_bytes(before[:-4])
    for words in ([models[0]], [models[1]], [models[1], "--most", 20]):
        call("choose", *words, "--data", data, "--out", out)
    assert files[0].read_bytes() == before


def test_what_a_folder_loses_as_shards_is_said(call, models, photos, tmp_path):
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    clear = Image.new("RGBA", (24, 20), (0, 0, 0, 0))
    clear.save(folder / "a" / "clear.png")
    (folder / "b" / "torn.png").write_bytes(b"no image")
    (folder / "c" / "film.mp4").write_bytes(b"a film")
    _, errors = call("choose", models[0], "--data", folder, "--out", tmp_path / "out")
    lines = errors.splitlines()
    with pytest.warns(UserWarning, match=".+") as warned:  # nobody listens to `say`
        sslpipe.choose(models[:1], folder, tmp_path / "quiet")
    messages = [str(each.message) for each in warned]
    for name, start in (("clear.png", "images"), ("torn.png", "skipped"), (".mp4", "skipped")):
        for said in (lines, messages):
            assert [line for line in said if name in line and line.startswith(start)], name
    assert not [line for line in messages if line.startswith("split ")]  # nothing is lost


def test_without_labels_it_says_so(call, models, photos, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        (flat / f"{number}.png").write_bytes(path.read_bytes())
    said, errors = call("choose", *models[:2], "--data", flat, "--out", tmp_path / "out")
    assert said.splitlines()[-3].startswith("Without labels, use ")
    assert "--px twice" in said  # which was not done
    assert "0 classes have two images or more" in said
    rows = json.loads((tmp_path / "out" / "choice.json").read_text())["rows"]
    joined = f"{models[0]}@16+{models[1]}@24"
    words = ["choose", models[0], joined, "--data", flat, "--out", tmp_path / "out"]
    _, errors = call(*words, status=2)
    assert "without labels a join is no candidate" in errors
    # as docs/adapting.md advises: of two networks at two sizes, one network at both
    both = ["--px", 16, "--px", 24, "--data", flat, "--out", tmp_path / "both"]
    said, errors = call("choose", *models[:2], *both)
    tree = json.loads((tmp_path / "both" / "choice.json").read_text())
    parts = tree["rows"][tree["used"]]["parts"]
    assert len({sources(models)[name].partition("@")[0] for name in parts}) == 1 < len(parts)
    assert f"Without labels, use {' + '.join(parts)}, power 0.25: " in said
    assert {row["power"] for row in rows} == {0.25}
    assert len(rows) == 3
    assert [row["score"] for row in rows] == sorted((r["score"] for r in rows), reverse=True)


def test_a_candidate_that_fails_is_named_and_the_others_are_ranked(call, models, photos, tmp_path):
    none, out = tmp_path / "none.pth", tmp_path / "out"
    words = [models[0], none, models[2], f"{models[1]}@70000"]
    said, errors = call("choose", *words, "--data", photos, "--out", out, status=2)
    skipped = [line for line in errors.splitlines() if line.startswith("skipped: ")]
    assert len(skipped) == 3 == len(json.loads((out / "choice.json").read_text())["skipped"])
    assert "there is no" in skipped[0]
    assert skipped[0].startswith(f"skipped: {none} is neither"), "its name stands there twice"
    assert "not finite" in skipped[1]
    assert "70000" in skipped[2]
    assert "Use small_resnet@16" in said
    _, errors = call("choose", none, "--data", photos, "--out", out, status=2)
    assert "error: no candidate can be read" in errors
    twice = [models[0], f"{models[0]}/"]  # under two names
    said, errors = call("choose", *twice, "--data", photos, "--out", out, status=2)
    assert "it is small_resnet@16 again" in errors


@pytest.mark.parametrize(
    ("count", "equal", "message"),
    [(10, False, "10 images are too few"), (25, True, "the same features: are they equal?")],
)
def test_images_that_cannot_choose_are_one_line(call, models, tmp_path, count, equal, message):
    for number in range(count):
        noise = np.random.default_rng(0 if equal else number).integers(0, 256, (20, 24, 3))
        Image.fromarray(noise.astype(np.uint8)).save(tmp_path / f"{number}.png")
    words = ["choose", models[0], "--data", tmp_path, "--out", tmp_path / "out"]
    _, errors = call(*words, status=2)
    assert message in errors
    assert errors.splitlines()[-1] == "error: no candidate can be ranked"


def test_another_folder_is_not_answered_with_the_first_ones_images(call, models, photos, tmp_path):
    other, out = tmp_path / "other", tmp_path / "out"
    for number, path in enumerate(sorted(photos.rglob("*.png"))[:30]):
        copy = other / f"c{number % 5}" / f"{number}.png"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    counts = []
    for folder in (photos, other, photos):
        call("choose", models[0], "--data", folder, "--out", out)
        counts.append("Features for train: 40 images" in (out / "choice.html").read_text())
    assert counts == [True, False, True]


def test_a_network_that_cannot_take_a_size_is_named_and_skipped(
    call, models, photos, tmp_path, monkeypatch
):
    def forward(self, images):
        if images.shape[-1] < 20:
            raise RuntimeError("Output size is too small")
        return self.backbone(images)

    monkeypatch.setattr(FrozenBackbone, "forward", forward)
    words = [models[0], "--px", 16, "--px", 24, "--data", photos, "--out", tmp_path / "out"]
    said, errors = call("choose", *words, status=2)
    assert "takes no images of 16 px here: Output size is too small" in errors
    assert "Use small_resnet@24" in said


@pytest.mark.parametrize(
    ("counts", "most", "classes", "each"),
    [
        ([800] * 10, 2000, 10, {200}),  # large classes: as many of each
        ([4] * 1000, 1000, 250, {4}),  # many small ones: whole classes
        ([3, 500, 500], 100, 3, {3, 33}),
        ([5] * 6, 100, 6, {5}),
    ],
)
def test_of_too_many_images_each_class_has_its_share(counts, most, classes, each):
    labels = np.repeat(np.arange(len(counts)), counts)

    class Rows(list):
        labels = property(np.array)

    ids = sample_ids(Rows(labels), most, 0)
    found = np.unique(labels[ids], return_counts=True)
    assert (len(found[0]), {*found[1].tolist()}) == (classes, each)
    assert (np.diff(ids) > 0).all()
    assert np.array_equal(ids, sample_ids(Rows(labels), most, 0))
    if len(labels) > most:
        assert not np.array_equal(ids, sample_ids(Rows(labels), most, 1))
    assert len(sample_ids(Rows(np.full(len(labels), -1)), most, 0)) == min(most, len(labels))


def test_a_join_and_a_source_with_a_size_keep_theirs(call, models, photos, tmp_path):
    one, two = models[:2]
    out = tmp_path / "out"
    words = [one, f"{two}@16", f"{one}@16+{two}@24", "--px", 24, "--data", photos, "--out", out]
    call("choose", *words)
    rows = json.loads((out / "choice.json").read_text())["rows"]
    # the join as a candidate of its own, which no other stands beside
    joined = "small_resnet 16 px + small_resnet 24 px@24"
    pair = ("small_resnet@24", "small_resnet@16")
    assert {tuple(row["parts"]) for row in rows} == {*((name,) for name in (*pair, joined)), pair}


@pytest.mark.promise(14)
def test_a_run_from_a_choice_joins_the_others_and_is_ranked_on_classes_it_has_not_seen(
    call, models, tmp_path
):
    data = write_dataset(tmp_path / "data", (24,) * 8, classes=24)
    out = tmp_path / "choice"
    words = ["choose", *models[:2], "--px", 16, "--px", 24, "--device", "cpu", "--num-workers", 0]
    call(*words, "--data", data, "--out", out)
    settings = ["data.validation_classes=10", "tune.eval_crop_px=auto", "run.keep=last"]
    settings += ["embedding={normalize=true}"]
    recipe = load_recipe(write_recipe(tmp_path), settings)
    start = ["--init", out, "--data", data, "--run-dir", tmp_path / "run"]
    _, told = call("train", write_recipe(tmp_path), *settings, *start)
    trained = load_backbone(tmp_path / "run")
    assert trained.view.config()["crop_px"] == open_init(recipe, out).view.crop_px
    seen = trained.config.facts["classes_seen"]
    assert len(seen) == 14
    again = tmp_path / "again"
    (line,) = re.findall("^Next, to join it .*: sslpipe (.*)$", told, re.MULTILINE)
    *words, last = shlex.split(line)
    assert last == f"{tmp_path / 'run'}-joined"
    said, errors = call(*words, again, "--device", "cpu", "--num-workers", 0)
    tree = json.loads((again / "choice.json").read_text())
    first = json.loads((out / "choice.json").read_text())["sources"]
    assert tree["sources"] == [*first, str(tmp_path / "run")]
    assert "5 classes that did not choose" in said
    assert "the 10 classes that it has not seen rank" in errors
    # the run's own rows are those of features without the labels that it has seen
    rows = sslpipe.embed(trained, data, "train", device="cpu", num_workers=0)
    unseen = torch.from_numpy(~np.isin(rows.labels.numpy(), seen))
    rows = rows._replace(labels=rows.labels.where(unseen, torch.tensor(SEEN)))
    name = f"{trained.name}@{trained.view.crop_px}"
    scores = {row["power"]: row["score"] for row in tree["rows"] if row["parts"] == [name]}
    expected = rank_with_labels({name: rows}, [(name,)])
    assert len(scores) == len(expected)
    for row in expected:
        assert scores[row.power] == pytest.approx(row.score, abs=1e-3)
    # another data set's labels are other classes
    other = write_dataset(tmp_path / "other", (24,) * 8, classes=12)
    assert not len(labels_seen([str(tmp_path / "run")], load_index(other), "train"))
    assert not len(labels_seen([str(tmp_path / "run")], load_index(data), "test"))


def test_a_run_that_kept_its_start_has_seen_no_labels_but_those_of_its_start(models, tmp_path):
    data = write_dataset(tmp_path / "data", (24,) * 8, classes=24)
    settings = ["steps=1", "optim.peak_lr=0", "run.keep=best", "data.validation_classes=10"]
    recipe = load_recipe(write_recipe(tmp_path), [*settings, "embedding={normalize=true}"])
    train(recipe, data, tmp_path / "start", init=models[0])
    labelled = load_recipe(write_recipe(tmp_path), ["steps=1", "run.keep=last"])
    train(labelled, data, tmp_path / "trained", init=models[0])
    train(recipe, data, tmp_path / "again", init=tmp_path / "trained")
    forget_accelerator()
    seen = {}
    for name in ("start", "trained", "again"):
        facts = load_backbone(tmp_path / name).config.facts
        assert facts["step"] == (name == "trained")
        seen[name] = len(labels_seen([str(tmp_path / name)], load_index(data), "train"))
    assert seen["start"] == 0 < min(seen["trained"], seen["again"])


def test_the_queries_of_the_page_have_an_image_of_their_class_to_find(tmp_path):
    """Of ten labelled images only two, at places 5 and 11, share a class; then none does."""
    split = load_index(write_dataset(tmp_path, (12,), px=8)).split("train")
    labels = torch.arange(12)
    labels[:2] = -1  # without a label: of no common class
    row = Ranked(parts=("net",), power=None, score=0.5, values={}, more={}, p=1.0)
    for matched in (True, False):
        labels[11] = 5 if matched else 11
        features = {"net": Embeddings(torch.randn(12, 4), labels, torch.arange(12))}
        table = Cells(["features"], [["net"]])
        page = choice_page(split, ["Use net."], table, ranked=[row], places=[0], features=features)
        queries = [int(text) for text in re.findall(r"<h3>sample (\d+)", page)]
        assert (set(queries) == {5, 11}) == matched
        assert len(queries) == (2 if matched else 8)
