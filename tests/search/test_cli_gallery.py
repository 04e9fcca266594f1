"""The gallery's command line: a folder of images a name is all that it needs."""

import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sslpipe.augment.eval_view import eval_view_for
from sslpipe.cli.terminal import encode_readable
from sslpipe.data.decode import decode
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import save_embeddings
from sslpipe.evaluation.flatten import Power
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.export.whitening import flatten_backbone, whiten
from sslpipe.export.write import export_backbone
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.search.gallery import Gallery


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An export's two files, of a random network."""
    return write_model(tmp_path_factory.mktemp("model"), seed=0)


def write_model(folder, seed):
    component = backbone_settings("small_resnet", {"widths": [8, 16], "normalize": True})
    torch.manual_seed(seed)
    backbone = build_backbone(component, crop_px=16)
    frozen = FrozenBackbone.of(backbone, component, eval_view_for(16, [0.5] * 3, [0.25] * 3), {})
    save_file(dict(backbone.state_dict()), folder / "model.safetensors")
    (folder / "config.json").write_text(frozen.config.model_dump_json())
    return folder


@pytest.fixture
def photos(tmp_path):
    """NAME/0.png to 2.png: one pattern a name, a little noise each; and strangers."""
    rng = np.random.default_rng(0)
    for name in ("ann", "bob", "cy"):
        pattern = rng.integers(0, 200, (20, 24, 3))
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            noisy = (pattern + rng.integers(0, 20, pattern.shape)).astype(np.uint8)
            Image.fromarray(noisy).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "strangers").mkdir()
    for number in range(10):
        noise = rng.integers(0, 256, (20, 24, 3)).astype(np.uint8)
        Image.fromarray(noise).save(tmp_path / "strangers" / f"{number}.png")
    return tmp_path


@pytest.fixture
def gallery(call):
    return lambda *words, **options: call("gallery", *words, **options)


def test_enrol_calibrate_identify_remove(photos, model, gallery):
    book = photos / "book.safetensors"
    said, _ = gallery("enrol", book, photos / "photos", "--model", model)
    assert "9 images of 3 names (ann, bob, cy); 3 names in all" in said
    backbone, loaded = load_backbone(model), Gallery.load(book)
    pixels = decode((photos / "photos/bob/1.png").read_bytes(), 256)
    expected = backbone.encode(torch.from_numpy(pixels)[None])
    torch.testing.assert_close(loaded.embeddings("bob")[1], expected[0], rtol=0, atol=1e-6)

    _, refused = gallery("calibrate", book, photos / "photos/bob", "--model", model, status=2)
    assert re.search(r"photos/bob/\d.png is an enrolled image of .bob.", refused)

    strangers = photos / "strangers"
    said, warned = gallery("calibrate", book, strangers, "--model", model)
    assert "from 10 strangers at FAR 0.01" in said
    assert "fewer than 100 strangers" in warned
    threshold = Gallery.load(book).threshold
    _, warned = gallery("calibrate", book, strangers, "--model", model, "--far", "0")
    assert "no number of strangers shows a FAR of 0" in warned
    assert Gallery.load(book).threshold == threshold

    words = ("identify", book, photos / "photos/cy", strangers, "--model", model)
    lines = [line.split("\t") for line in gallery(*words)[0].splitlines()]
    assert [line[1] for line in lines] == ["cy"] * 3 + ["-"] * 10
    assert all(float(line[2].split()[0]) < threshold for line in lines[3:])

    gallery("remove", book, "cy")
    said, _ = gallery("identify", book, photos / "photos/cy/0.png", "--model", model)
    assert "\tcy" not in said
    one = photos / "photos/cy/0.png"
    gallery("add", book, "cy", one, "--model", model)
    said, _ = gallery("list", book)
    assert [line.split() for line in said.splitlines()[:3]] == [
        ["3", "ann"],
        ["3", "bob"],
        ["1", "cy"],
    ]


def test_an_image_is_enrolled_once_under_a_name(photos, model, gallery):
    """The same folder again, with one image more, adds that one: the file has 3, 4 and 3 rows."""
    book = photos / "book.safetensors"
    words = ("enrol", book, photos / "photos", "--model", model)
    gallery(*words)
    before = Gallery.load(book)
    said, _ = gallery(*words)
    assert "nothing new; 3 names in all" in said
    shutil.copy(photos / "strangers" / "0.png", photos / "photos" / "bob" / "new.png")
    said, warned = gallery(*words)
    assert "1 image of 1 name (bob); 3 names in all" in said
    assert "skipped: 9 images enrolled already" in warned
    after = Gallery.load(book)
    for name, more in (("ann", 0), ("bob", 1), ("cy", 0)):
        rows = before.embeddings(name)
        assert len(after.embeddings(name)) == len(rows) + more
        assert torch.equal(after.embeddings(name)[: len(rows)], rows)


def test_a_threshold_of_fewer_names_is_reported(photos, model, gallery):
    """A false accept rate holds for the names that it was set with."""
    book, strangers = photos / "grown.safetensors", photos / "strangers"
    gallery("add", book, "ann", photos / "photos/ann/0.png", "--model", model)
    gallery("calibrate", book, strangers, "--model", model, "--far", "0.2")
    _, said = gallery("add", book, "ann", photos / "photos/ann/1.png", "--model", model)
    assert "sets it anew" not in said
    _, said = gallery("enrol", book, photos / "photos", "--model", model)
    assert "was set with 1 name, and there are 3" in said
    shown, _ = gallery("list", book)
    assert "set by 10 strangers at FAR 0.2 among 1 names" in shown
    gallery("calibrate", book, strangers, "--model", model, "--far", "0.2")
    _, said = gallery("add", book, "bob", photos / "photos/bob/0.png", "--model", model)
    assert "sets it anew" not in said


def test_a_gallery_takes_the_whitening_of_its_export(photos, model, gallery, tmp_path):
    """Enrolled rows are those of `encode`, and an export that was whitened since is another one."""
    own, book = tmp_path / "own", photos / "book.safetensors"
    shutil.copytree(model, own)
    plain = load_backbone(own)
    files = sorted((photos / "photos").rglob("*.png"))
    gallery("enrol", book, photos / "photos", "--model", own)
    features = plain.encode(files)
    rows = Embeddings(features, torch.zeros(9, dtype=torch.int64), torch.arange(9))
    metadata = {"backbone_sha256": plain.config.weights_sha256, "view": plain.view.config()}
    save_embeddings(tmp_path / "train.safetensors", rows, metadata)
    whiten(own, tmp_path / "train.safetensors", dims=4)

    _, said = gallery("identify", book, files[0], "--model", own, status=2)
    assert "another model" in said
    fresh = photos / "fresh.safetensors"
    gallery("enrol", fresh, photos / "photos", "--model", own)
    enrolled = torch.cat([Gallery.load(fresh).embeddings(name) for name in ("ann", "bob", "cy")])
    expected = torch.nn.functional.normalize(load_backbone(own).encode(files))
    torch.testing.assert_close(enrolled, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_gallery_of_python_is_that_of_the_command_with_what_choose_writes(
    photos, model, gallery, tmp_path, is_joined
):
    """Flattened, or of two sizes and flattened: to the bit, and each takes the other's file."""
    source = tmp_path / "source"
    network = load_backbone(f"{model}@16+{model}@24" if is_joined else model)
    files = sorted((photos / "photos").rglob("*.png"))
    rows = Embeddings(network.encode(files), torch.zeros(9).long(), torch.arange(9))
    flatten_backbone(network, fit_whitening(rows, power=0.5))
    export_backbone(network, source, ["safetensors"])
    backbone = load_backbone(source)
    assert backbone.whitening is not None

    book = photos / "book.safetensors"
    _, said = gallery("enrol", book, photos / "photos", "--model", source)
    assert "as their export flattened them" in said
    own = Gallery(backbone.num_features, metadata=backbone.network_facts)
    own.enrol([path.parent.name for path in files], backbone.encode(files))
    of_command = Gallery.load(book)
    strangers = backbone.encode(sorted((photos / "strangers").glob("*.png")))
    assert own.rank(strangers, 3) == of_command.rank(strangers, 3)
    own.calibrate(strangers, 0.1)
    own.save(photos / "own.safetensors")
    gallery("calibrate", book, photos / "strangers", "--model", source, "--far", "0.1")
    words = (photos / "photos", photos / "strangers", "--model", source)
    first, _ = gallery("identify", book, *words)
    assert gallery("identify", photos / "own.safetensors", *words)[0] == first
    assert first.count("\t-") >= 9


def test_a_gallery_of_another_size_of_images_or_of_no_named_model_is_refused(
    photos, model, gallery
):
    book = photos / "book.safetensors"
    gallery("enrol", book, photos / "photos", "--model", model)
    words = ("identify", book, photos / "photos", "--model", f"{model}@24")
    _, said = gallery(*words, status=2)
    assert "another model, size of images, flattening or background (" in said
    assert "view" in said
    Gallery(16).save(book)
    _, said = gallery(*words, status=2)
    assert "does not say which model made it" in said


def test_a_new_gallery_is_flattened_where_there_are_enough_images(
    photos, model, gallery, monkeypatch
):
    book, plain = photos / "book.safetensors", photos / "plain.safetensors"
    words = photos / "photos", "--model", model
    _, said = gallery("enrol", plain, *words)
    assert "features as they are: 9 images are too few to flatten (100)" in said
    monkeypatch.setattr("sslpipe.search.flattening.LEAST_FLATTENED", 9)
    _, said = gallery("enrol", book, *words)
    assert "features flattened, fitted on 9 images (power 0.25" in said
    assert "--no-flatten: as they are" in said
    assert "features flattened, fitted on 9 images" in gallery("list", book)[0]
    assert "features as the model gives them" in gallery("list", plain)[0]
    raw = load_backbone(model).encode(sorted((photos / "photos/bob").glob("*.png")))
    loaded = Gallery.load(book)
    expected = torch.nn.functional.normalize(loaded.flattening.apply(raw))
    torch.testing.assert_close(loaded.embeddings("bob"), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(Gallery.load(plain).embeddings("bob"), expected, atol=1e-2)
    # it keeps its form, and its space
    gallery("add", book, "dora", photos / "strangers/0.png", "--model", model)
    assert torch.equal(Gallery.load(book).flattening.mean, loaded.flattening.mean)
    said, _ = gallery("identify", book, photos / "photos/cy/0.png", "--model", model)
    assert said.split("\t")[1] == "cy"
    for file, option in ((book, "--no-flatten"), (plain, "--flatten")):
        _, said = gallery("enrol", file, *words, option, status=2)
        assert "keeps the form that it was made in" in said
    _, said = gallery("enrol", photos / "third.safetensors", *words, "--no-flatten")
    assert "features as they are" in said
    harm = Power(0.5, "MAP@R falls", False)
    monkeypatch.setattr("sslpipe.search.flattening.choose_power", lambda rows: harm)
    _, said = gallery("enrol", photos / "fourth.safetensors", *words)
    assert "features as they are, which no flattening improves (MAP@R falls)" in said


def test_without_a_threshold_every_answer_says_so_and_calibrate_comes_next(photos, model, gallery):
    book, strangers = photos / "book.safetensors", photos / "strangers"
    _, after = gallery("enrol", book, photos / "photos", "--model", model)
    assert f"sslpipe gallery calibrate {book} STRANGERS --model {model}" in after
    assert gallery("list", book)[0].splitlines()[-1].startswith("threshold not set")
    words = ("identify", book, strangers, "--model", model)
    said, after = gallery(*words)
    assert [line.endswith("(nearest name, no threshold set)") for line in said.splitlines()] == (
        [True] * 10
    )
    assert "a stranger's too" in after
    assert f"sslpipe gallery calibrate {book} STRANGERS --model {model}" in after

    _, after = gallery("calibrate", book, strangers, "--model", model)
    assert "sslpipe gallery identify" in after
    said, after = gallery(*words)
    assert "no threshold" not in said + after


def test_names_and_files_with_control_characters_are_shown_as_text(photos, model, gallery):
    book = photos / "book.safetensors"
    evil = "\x1b]0;owned\x07\x1b[2Jann"
    gallery("add", book, evil, photos / "photos/ann/0.png", "--model", model)
    (photos / "photos/ann/0.png").rename(photos / "photos/\x1b[31mred.png")
    for words in (
        ("list", book),
        ("identify", book, photos / "photos/\x1b[31mred.png", "--model", model),
        ("remove", book, evil),
    ):
        said, after = gallery(*words)
        assert "\x1b" not in said + after
        assert "\\x1b" in said


def test_verify_says_same_or_different_and_so_does_its_status(photos, model, gallery):
    ann, bob = photos / "photos/ann", photos / "photos/bob"
    options = ("--model", model, "--pairs", photos / "photos", "--far", "0")
    said, _ = gallery("verify", ann / "0.png", ann / "1.png", *options)
    assert said.split("\t")[0] == "same"
    said, _ = gallery("verify", ann / "0.png", bob / "1.png", *options, status=1)
    assert said.split("\t")[0] == "different"


def test_mistakes_are_one_line(photos, model, gallery, tmp_path_factory):
    book = photos / "book.safetensors"
    gallery("enrol", book, photos / "photos", "--model", model)
    other = write_model(tmp_path_factory.mktemp("other"), seed=1)
    (photos / "photos/ann/bad.png").write_bytes(b"junk")
    (photos / "cut.safetensors").write_bytes(book.read_bytes()[:99])  # by a full disk
    enrol_cut = ("enrol", photos / "cut.safetensors", photos / "photos", "--model", model)
    for words, text in (
        (("identify", book, photos / "strangers", "--model", other), "made with another model"),
        (("enrol", book, photos / "strangers", "--model", model), "has no folders; expected one a"),
        (("identify", book, photos / "no.png", "--model", model), "No such file"),
        (("identify", photos / "no", photos, "--model", model), "holds no gallery"),
        (enrol_cut, "restore a copy, or enrol into a new file"),
        (("verify", photos, photos, "--model", model), "give --threshold, or --pairs"),
        (("remove", book, "an"), "did you mean 'ann'"),
    ):
        _, said = gallery(*words, status=2)
        assert text in said
    new = photos / "new.safetensors"
    said, warned = gallery("enrol", new, photos / "photos", "--model", model)
    assert "skipped" in warned
    assert "9 images of 3 names" in said


@pytest.mark.parametrize("command", ["add", "calibrate"])
def test_what_others_enrol_while_images_are_read_stays(
    photos, model, gallery, monkeypatch, command
):
    book = photos / "book.safetensors"
    gallery("enrol", book, photos / "photos", "--model", model)

    def read_slowly(*arguments):
        other = Gallery.load(book)
        other.add("zoe", torch.randn(16, generator=torch.Generator().manual_seed(0)))
        other.save(book)
        return encode_readable(*arguments)

    module = {"add": "gallery_files", "calibrate": "gallery"}[command]
    monkeypatch.setattr(f"sslpipe.search.cli.{module}.encode_readable", read_slowly)
    words = {"add": ("dan", photos / "strangers/0.png"), "calibrate": (photos / "strangers",)}
    gallery(command, book, *words[command], "--model", model)
    after = Gallery.load(book)
    assert {"ann", "bob", "cy", "zoe"} <= {*after.names}
    assert ("dan" in after) == (command == "add")
    assert after.calibrated == (command == "calibrate")


def test_an_image_of_two_names_is_said(photos, model, gallery):
    book = photos / "book.safetensors"
    _, said = gallery("enrol", book, photos / "photos", "--model", model)
    assert "two names" not in said
    _, said = gallery("add", book, "ann", photos / "photos/ann/0.png", "--model", model)
    assert "two names" not in said
    _, said = gallery("add", book, "zoe", photos / "photos/ann/0.png", "--model", model)
    assert "1 image enrolled under two names, such as zoe and ann" in said


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_to_a_gallery_stays_one_and_who_is_removed_is_in_no_file(
    photos, model, gallery, is_there
):
    (photos / "shared").mkdir()
    book = photos / "shared" / "book.safetensors"
    link = photos / "link.safetensors"
    link.symlink_to(book)
    if is_there:
        gallery("enrol", book, photos / "photos", "--model", model)
    gallery("enrol", link, photos / "photos", "--model", model)
    gallery("remove", link, "bob")
    gallery("calibrate", link, photos / "strangers", "--model", model)
    assert link.is_symlink()
    assert Gallery.load(book).names == ("ann", "cy")
    assert Gallery.load(book).calibrated
