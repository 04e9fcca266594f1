"""`encode` takes images in every usual form, as they are embedded, and refuses the rest."""

import os
import re
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import sslpipe
import sslpipe.cli.embed
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.decode import decode
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.export.write import FORMATS, export_backbone
from sslpipe.models.state import module_sha256
from tests.helpers.dataset import write_dataset
from tests.helpers.exports import trained
from tests.helpers.processes import run_processes
from tests.helpers.runs import ROOT


@pytest.fixture(scope="module")
def model():
    return trained()


def pixels(height=40, width=52, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def through(model, image):
    """The oracle: one RGB image (3, H, W) through the view and the network."""
    view = model.view(image[None], torch.tensor([image.shape[-2:]]))
    return model.view.reduced(model(view))


def first(image):
    return torch.from_numpy(image.copy()).permute(2, 0, 1)


def test_files_and_pil_images_are_decoded_as_they_are_embedded(model, tmp_path):
    colour, grey = pixels(), pixels(channels=1)[..., 0]
    exif = Image.Exif()
    exif[0x0112] = 6
    three = np.repeat(grey[..., None], 3, 2)
    cases = {
        "rgb.png": (colour, {}, colour),
        "exif.png": (colour, {"exif": exif}, np.rot90(colour, -1)),
        "grey.png": (grey, {}, three),
        "deep.png": (grey.astype(np.uint16) * 257, {}, three),
        "alpha.png": (np.dstack([colour, grey]), {}, colour),
        "lossless.webp": (colour, {"lossless": True}, colour),
        "rgb.bmp": (colour, {}, colour),
        "exif.tif": (colour, {"exif": exif}, np.rot90(colour, -1)),
        "grey.gif": (grey, {}, three),
        "rgb.ppm": (colour, {}, colour),
    }
    for name, (image, options, expected) in cases.items():
        path = tmp_path / name
        Image.fromarray(image).save(path, **options)
        wanted = through(model, first(expected))
        with Image.open(path) as opened:
            array = np.asarray(expected)
            bgr = array[..., ::-1]  # as OpenCV has it
            for given in (
                *(path, str(path), opened, [path], first(expected), first(expected)[None]),
                *(path.read_bytes(), array, array[None], bgr[..., ::-1]),
            ):
                torch.testing.assert_close(model.encode(given), wanted, rtol=1e-5, atol=1e-6)
    single = first(grey[..., None])
    assert torch.equal(model.encode(single), model.encode(grey))
    assert torch.equal(model.encode(single), model.encode(single.repeat(3, 1, 1)))
    assert torch.equal(model.encode(single[None]), model.encode(single))
    large = tmp_path / "large.jpg"
    Image.fromarray(pixels(900, 700)).save(large)
    canvas = torch.from_numpy(decode(large.read_bytes(), model.view.canvas_px).copy())
    torch.testing.assert_close(model.encode(large), through(model, canvas))


def test_a_list_of_any_sizes_and_forms_gives_a_row_an_image_in_order(model, tmp_path):
    model = trained()
    config = model.view.config()
    model.view = EvalView(**config | {"resize_px": config["crop_px"] + 8})
    arrays = [pixels(40, 52), pixels(33, 90), pixels(64, 64)]
    images = [first(array) for array in arrays]
    Image.fromarray(arrays[1]).save(tmp_path / "a.png")
    pil = Image.fromarray(arrays[2])
    rows = model.encode([images[0], tmp_path / "a.png", pil, torch.stack([images[2]] * 2)])
    expected = torch.cat([through(model, images[n]) for n in (0, 1, 2, 2, 2)])
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
    many = model.encode([images[n % 3] for n in range(70)])
    torch.testing.assert_close(many[69], expected[0], rtol=1e-5, atol=1e-6)


X = torch.zeros(2, 3, 40, 40, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("given", "named", "remedy"),
    [
        (X.float() / 255, "torch.float32", "uint8"),
        (X.bool(), "torch.bool", "uint8"),
        ([X[0], X[1].float()], r"images\[1\] is a tensor of torch.float32", "uint8"),
        (torch.zeros(2, 5, 40, 40, dtype=torch.uint8), r"\(2, 5, 40, 40\)", "3 channels"),
        (X.permute(0, 2, 3, 1), r"\(2, 40, 40, 3\)", r"\(B, C, H, W\)"),
        (X[0, 0], r"\(40, 40\)", "give paths"),
        (X[None], r"\(1, 2, 3, 40, 40\)", "give paths"),
        (X[:, :, :0], r"\(2, 3, 0, 40\)", "no pixels"),
        ([pixels() / 255], r"images\[0\] is a ndarray of float64", "uint8"),
        (np.zeros((40, 40, 4), np.uint8), r"\(40, 40, 4\)", "3 channels"),
        ([], "empty list", "at least one"),
        ([X[:0]], "no image", "at least one"),
        (b"raw", r"images\[0\] cannot be encoded", ""),
        ([None], r"images\[0\] is a NoneType", "give paths"),
        ("nowhere.png", "nowhere.png", "No such file"),
        ("/", "/", r"rglob\('\*\.jpg'\)"),
        (Image.new("F", (9, 9)), "'F'", "to 8 bits"),
        (Image.new("I", (9, 9)), "'I'", "to 16, mode 'I;16'"),
    ],
)
def test_what_is_no_image_is_refused_by_name_with_the_remedy(model, given, named, remedy):
    with pytest.raises(UserError, match=named) as caught:
        model.encode(given)
    assert caught.match(remedy)


@pytest.mark.parametrize("damage", ["negative variance", "1e38"])
def test_features_that_are_not_finite_are_refused_before_they_are_written(
    killed_run, damage, tmp_path
):
    model = trained()
    state = model.backbone.state_dict()
    if damage == "negative variance":
        state["network.1.running_var"].fill_(-1)
    for tensor in state.values() if damage == "1e38" else ():
        tensor.mul_(1e38 if tensor.is_floating_point() else 1)
    with pytest.raises(UserError, match=rf"image 0 .*not finite.*{model.name}"):
        model.encode(X + 100)
    with pytest.raises(UserError, match="not finite"):
        export_backbone(model, tmp_path / "out", ["safetensors"])
    assert not any(tmp_path.iterdir())
    # nor by the command, of weights that nobody has proved
    model.update_config(weights_sha256=module_sha256(model.backbone))
    FORMATS["safetensors"].write(model, tmp_path)
    words = ["--data", killed_run / "data", "--split", "test", "--out", tmp_path / "x.safetensors"]
    result = CliRunner().invoke(sslpipe.cli.embed.app, [str(tmp_path), *map(str, words)])
    assert re.search(f"sample 0 of split 'test'.*{model.name}", str(result.exception))
    assert not (tmp_path / "x.safetensors").exists()


def test_what_cannot_be_decoded_is_reported_and_left_out_on_request(model, tmp_path):
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no image")
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 2**42)  # read at all, no memory holds it
    with pytest.raises(UserError, match=r"large.png cannot be encoded: .* than the limit"):
        model.encode(tmp_path / "large.png")
    given, bad, done = [tmp_path / "a.png", tmp_path / "b.png", X[0]], [], []
    rows = model.encode(given, on_bad=lambda *what: bad.append(what), advance=done.append)
    expected = torch.cat([model.encode(given[0]), model.encode(X[0])])
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
    ((place, reason),) = bad
    assert (place, done) == (1, [3])
    assert reason.startswith(f"{tmp_path / 'b.png'} cannot be encoded")
    with pytest.raises(UserError, match=re.escape(reason)):
        model.encode(given)
    (tmp_path / "folder.png").mkdir()
    for wrong in (tmp_path / "gone.png", tmp_path / "folder.png", 7):  # no decoder has seen them
        with pytest.raises(UserError, match=getattr(wrong, "name", "int")):
            model.encode([wrong], on_bad=lambda *what: None)


def two_steps_under_ddp(process, folder, code):
    """Weights after two steps, by the lines of the page."""
    images = torch.randint(
        0, 256, (4, 3, 40, 40), dtype=torch.uint8, generator=seeded(process.rank)
    )
    known = {"sslpipe": sslpipe, "images": images, "sizes": torch.tensor([[40, 40]] * 4)}
    exec(code.replace("FOLDER", str(folder)), known)
    backbone = known["backbone"]
    assert known["features"].requires_grad
    trained = DistributedDataParallel(backbone)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(2):
        loss = trained(backbone.view(images, known["sizes"])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    backbone.encode(images)
    return torch.cat([each.detach().flatten() for each in backbone.parameters()])


def seeded(number):
    return torch.Generator().manual_seed(number)


def test_an_export_is_trained_under_ddp_by_the_lines_of_the_page(tmp_path):
    exported = trained()
    FORMATS["safetensors"].write(exported, tmp_path)
    page = (ROOT / "docs" / "export.md").read_text()
    (code,) = [
        each for each in re.findall(r"```python\n(.*?)```", page, re.S) if ".train()" in each
    ]
    results = run_processes(two_steps_under_ddp, 2, tmp_path, code)
    start = torch.cat([each.flatten() for each in exported.parameters()])
    for weights in results:
        assert torch.equal(weights, results[0])  # gradients were averaged
        assert not torch.equal(weights, start)


def modes(model):
    return [module.training for module in model.modules()]


def test_encode_is_in_eval_mode_and_restores_each_modules_own(tmp_path):
    model = trained()
    images = torch.randint(0, 256, (6, 3, 40, 40), dtype=torch.uint8, generator=seeded(0))
    expected, state = model.encode(images), module_sha256(model)
    model.train()
    model.backbone.network[1].eval()
    before = modes(model)
    assert before.count(False) == 1
    for given in (images, list(images)):
        torch.testing.assert_close(model.encode(given), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.encode(images[:1]), expected[:1], rtol=1e-5, atol=1e-6)
    model.backbone.network[0].weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        model.encode(images)
    with pytest.raises(RuntimeError, match="stopped"), stopping(model.backbone):
        model.encode(images)
    assert modes(model) == before
    model.backbone.network[0].weight.data.copy_(trained().backbone.network[0].weight)
    assert module_sha256(model) == state  # no running statistic has moved


def test_frozen_weights_under_moving_statistics_are_warned_of_once():
    model = trained()
    images = torch.randn(4, 3, 32, 32, generator=seeded(0))
    classifier = torch.nn.Sequential(model, torch.nn.Linear(model.num_features, 2))
    state = module_sha256(model)

    def warned():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            classifier(images).sum().backward()
        return [each for each in caught if "eval()" in str(each.message)]

    assert not warned()
    assert module_sha256(model) == state
    classifier.train()
    model.eval()
    assert not warned()
    assert module_sha256(model) == state
    classifier.train()
    assert len(warned()) == 1
    assert module_sha256(model) != state  # what the warning is of
    assert not warned()  # once

    trainable = trained().train().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainable(images)


@contextmanager
def stopping(module):
    def stop(*_):
        raise RuntimeError("stopped")

    handle = module.register_forward_hook(stop)
    yield
    handle.remove()


def test_a_join_encodes_in_eval_mode(tmp_path):
    for name, kind in (("a", {}), ("b", {"widths": [8, 16]})):
        (tmp_path / name).mkdir()
        FORMATS["safetensors"].write(trained(**kind), tmp_path / name)
    joined = sslpipe.load_backbone(f"{tmp_path / 'a'}+{tmp_path / 'b'}")
    expected, state = joined.encode(X + 9), module_sha256(joined)
    joined.train()
    torch.testing.assert_close(joined.encode(X + 9), expected)
    assert joined.training
    assert module_sha256(joined) == state


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 1e-2), (torch.bfloat16, 5e-2), (torch.float64, 1e-5)],
)
def test_weights_of_any_dtype_encode_to_float32(dtype, tolerance, tmp_path):
    model = trained()
    image = pixels()
    Image.fromarray(image).save(tmp_path / "a.png")
    expected = model.encode(tmp_path / "a.png")
    model.to(dtype)
    for given in (first(image), tmp_path / "a.png"):
        rows = model.encode(given)
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows, expected, rtol=0, atol=tolerance * float(expected.max()))
    torch.testing.assert_close(model.float().view.mean, torch.tensor([0.4, 0.5, 0.6]))


def test_an_autocast_around_it_changes_no_features(tmp_path):
    """As in a loop of one's own, whose features are then compared with those of the command."""
    model = trained()
    data = load_index(write_dataset(tmp_path / "data", (6,)))
    expected = model.encode(X + 9)
    embedded = sslpipe.embed(model, data, "train").features
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.encode(X + 9), expected)
        assert torch.equal(sslpipe.embed(model, data, "train").features, embedded)


def test_another_default_dtype_changes_nothing(tmp_path):
    FORMATS["safetensors"].write(trained(), tmp_path)
    expected = sslpipe.load_backbone(tmp_path).encode(X + 9)
    torch.set_default_dtype(torch.float64)
    try:
        model = sslpipe.load_backbone(tmp_path)  # whose sha256 is that of the export
        assert torch.equal(model.encode(X + 9), expected)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
