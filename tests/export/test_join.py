"""A+B is both networks' features side by side, whatever their sizes, also through an export."""

import json
import shutil
from pathlib import Path

import onnxruntime
import pytest
import timm
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import sslpipe.cli.embed
import sslpipe.cli.export
from sslpipe.augment.eval_view import EvalView, JoinedView
from sslpipe.errors import ExportError, UserError, WeightsError
from sslpipe.evaluation.feature_files import load_embeddings
from sslpipe.export import write
from sslpipe.export.join import at_size
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.export.named import open_init
from sslpipe.export.start import Start, with_init
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.recipe.reading import load_recipe
from sslpipe.weights.source import parse_source
from tests.helpers.dataset import write_dataset
from tests.helpers.weights import randomised, saved

PART = {"kind": "timm/test_resnet", "crop_px": 64}
RECIPES = Path(__file__).parents[2] / "recipes"
CONV, VIT = "timm/test_resnet", "timm/test_vit"
pytestmark = pytest.mark.usefixtures("proved_here")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Sources of small networks: a convolutional one, a vision transformer, one as the first."""
    folder = tmp_path_factory.mktemp("join")
    sources = []
    for seed, kind in enumerate((CONV, VIT, CONV)):
        network = randomised(timm.create_model(kind.removeprefix("timm/")), seed)
        sources.append(f"{kind}@{saved(network.state_dict(), folder, f'{seed}.pth')}")
    return sources


@pytest.fixture
def pictures():
    torch.manual_seed(0)
    return [torch.randint(0, 256, (3, *size)).byte() for size in ((70, 90), (200, 60))]


def side_by_side(sources, pictures):
    rows = [F.normalize(load_backbone(source).encode(pictures), dim=1) for source in sources]
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize(
    ("which", "sizes"),
    [
        ((0, 1), ("", "")),
        ((0, 1), ("@64", "@96")),
        ((2, 0), ("@64", "@64")),
        ((0, 0), ("@64", "@96")),
        ((1, 1), ("@64", "@96")),  # a vision transformer has a position table a size
        ((0, 1, 2), ("@64", "@96", "@64")),
    ],
)
def test_features_are_unit_rows_of_all_side_by_side(files, pictures, which, sizes):
    sources = [f"{files[n]}{size}" for n, size in zip(which, sizes, strict=True)]
    model = load_backbone("+".join(sources))
    assert len(model.backbone.network) == len(model.view.config()["views"]) == len(which)
    assert torch.equal(model.encode(pictures), side_by_side(sources, pictures))


def test_an_export_of_a_join_is_the_join_also_by_onnxruntime_alone(files, pictures, tmp_path):
    sources = [f"{files[0]}@64", f"{files[1]}@96"]
    words = ["export", "+".join(sources), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(sslpipe.cli.export.app, [*words, "--format", "safetensors,onnx"])
    assert result.exit_code == 0, result.output
    expected = side_by_side(sources, pictures)
    assert torch.equal(load_backbone(tmp_path / "out").encode(pictures), expected)
    # by hand: each part's own view, as the file says
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    views = json.loads(session.get_modelmeta().custom_metadata_map["views"])
    for picture, row in zip(pictures, expected.numpy(), strict=True):
        size = torch.tensor([picture.shape[-2:]])
        images = [EvalView(**each)(picture[None], size).reshape(1, 3, 1, -1) for each in views]
        given = torch.cat(images, dim=3).numpy()
        assert session.run(["features"], {"images": given})[0][0] == pytest.approx(row, abs=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2 parts side by side" in card
    assert all(f"of {px} px, weights sha256" in card for px in (64, 96))


def test_a_join_is_embedded_and_its_export_whitened(files, tmp_path):
    data = write_dataset(tmp_path / "data", (12,))
    source, out = "+".join(f"{file}@64" for file in files[:2]), tmp_path / "out"
    write.export_backbone(load_backbone(source), out, ["safetensors"])

    def run(app, *words) -> None:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output

    rows = []
    for number, model in enumerate((source, out)):
        file = tmp_path / f"{number}.safetensors"
        run(sslpipe.cli.embed.app, model, "--data", data, "--split", "train", "--out", file)
        rows.append(load_embeddings(file))
    assert torch.equal(rows[0][0].features, rows[1][0].features)
    assert rows[0][1]["backbone_sha256"] == rows[1][1]["backbone_sha256"]
    assert rows[0][0].features.norm(dim=1) == pytest.approx(2**0.5)
    run(sslpipe.cli.export.app, "whiten", out, file, "--power", "0.25", "--dims", "8")
    assert load_backbone(out).encode(torch.zeros(3, 64, 64, dtype=torch.uint8)).shape == (1, 8)
    with pytest.raises(UserError, match=r"has a whitening.*name what it was made from"):
        load_backbone(f"{out}+{files[0]}")


def test_a_size_of_an_export_is_that_of_the_weights(files, pictures, tmp_path):
    write.export_backbone(load_backbone(f"{files[0]}@64"), tmp_path / "out", ["safetensors"])
    ours, theirs = load_backbone(f"{tmp_path / 'out'}@96"), load_backbone(f"{files[0]}@96")
    assert ours.view.config()["crop_px"] == 96
    assert torch.equal(ours.encode(pictures), theirs.encode(pictures))


def test_another_size_resizes_tables_and_keeps_all_other_tensors():
    component = backbone_settings(VIT, {"embedding_dim": 8})
    network = randomised(build_backbone(component, crop_px=64), 3)
    model = FrozenBackbone.of(network, component, EvalView(64, 64), {"evaluation": [], "name": "x"})
    sized = at_size(model, 96, "x@96")
    before, after = model.backbone.state_dict(), sized.backbone.state_dict()
    changed = [key for key in before if before[key].shape != after[key].shape]
    assert changed == ["network.pos_embed"]
    assert all(torch.equal(before[key], after[key]) for key in before if key not in changed)
    table = after[changed[0]][0, -36:]  # a patch has 16 px
    assert torch.allclose(table.mean(), before[changed[0]][0, -16:].mean(), atol=0.02)
    assert sized(torch.zeros(1, 3, 96, 96)).shape == (1, 8)
    assert sized.config.facts == {"name": "x"}  # numbers were of the other size


def test_what_a_source_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp a+b").mkdir()
    for name in ("a+b.pth", "a.pth", "b.pth", "c@64.pth", "exp a+b/w+x.pth"):
        (tmp_path / name).write_bytes(b"")
    single = {"a.pth@64": 64, "timm/x@a.pth@96": 96, "timm:x@128": 128}
    single |= {"exp a+b/w+x.pth@64": 64, "timm/x@exp a+b/w+x.pth@64": 64, "a+b.pth@32": 32}
    named = ("a+b.pth", "timm/x@a+b.pth", "c@64.pth", "timm/x@c@64.pth")
    for text, px in {**single, **dict.fromkeys(named)}.items():
        source = parse_source(text)
        assert (source.px, source.parts, source.text) == (px, (), text)
    for text, parts in {
        "exp a+b/w+x.pth@64+a+b.pth": ["exp a+b/w+x.pth@64", "a+b.pth"],
        "a.pth+timm/x@exp a+b/w+x.pth+timm:y@96": [
            "a.pth", "timm/x@exp a+b/w+x.pth", "timm:y@96"
        ],
        "local-dir:exp a+b/w+x.pth@64+b.pth": ["local-dir:exp a+b/w+x.pth@64", "b.pth"],
    }.items():  # fmt: skip
        source = parse_source(text)
        assert ([part.text for part in source.parts], source.px) == (parts, None)
    parts = parse_source("a.pth@64+timm/x@b.pth+timm:y").parts
    assert [part.text for part in parts] == ["a.pth@64", "timm/x@b.pth", "timm:y"]
    assert [part.px for part in parts] == [64, None, None]
    for text, said in [("a.pth+a.pth", "joins one network with itself"),
                       ("a.pth@64@96", r"names two sizes; write one, as in a.pth@64$"),
                       ("a.pth+none.pth", "there is no none.pth"),
                       ("none+", r"there is no none\+")]:  # fmt: skip
        with pytest.raises(WeightsError, match=said):
            parse_source(text)


def test_what_cannot_be_joined_or_trained_is_refused(files, index, tmp_path):
    conv = files[0]
    file = conv.partition("@")[2]
    with pytest.raises(UserError, match="joins test_resnet with itself"):
        load_backbone(f"{conv}+{CONV}@/{file}")  # another name of the file
    for px in (0, 99999):
        with pytest.raises(WeightsError, match=f"asks for images of {px}"):
            load_backbone(f"{conv}@{px}")
    recipe = load_recipe(RECIPES / "my_images_small.toml", ["augment.crop_px=64"])
    for text, said in [(f"{conv}@64+{conv}@96", "a join is not trained"),
                       (f"{conv}@96", "images have 64 px here; leave @96 out")]:  # fmt: skip
        with pytest.raises(UserError, match=said):
            open_init(recipe, text)
    joined = load_backbone(f"{conv}@64+{conv}@96")
    with pytest.raises(UserError, match="is a join, and a join is not trained"):
        with_init(recipe, joined, index)
    with pytest.raises(ValueError, match="two or more views"):
        JoinedView([EvalView(8, 8)])


@pytest.fixture(scope="module")
def exported(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("joined") / "out"
    write.export_backbone(load_backbone(f"{files[0]}@64+{files[0]}@96"), out, ["safetensors"])
    return out


@pytest.mark.parametrize(
    "change",
    [
        {"parts": [PART]},
        {"parts": [PART] * 17},
        {"parts": [PART, {**PART, "crop_px": 32}]},  # the views are of other sides
        {"parts": [PART, {"kind": "timm/test_resnet"}]},
        {"parts": [PART, {**PART, "crop_px": "64"}]},
        {"parts": [PART, {"kind": "join", "crop_px": 64}]},
        {"parts": [{"kind": "timm/vit_base_patch16_224", "crop_px": 224}] * 200},  # 70 GB
        {"parts": [{**PART, "kind": "timm/vit_7b_patch16_dinov3", "crop_px": 224}] * 16},
        {"parts": 3},
        {"parts": [3, 3]},
        {"parts": None},
    ],
)
def test_a_config_of_a_stranger_is_refused_in_one_line(exported, tmp_path, change):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(exported / name, tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    tree["backbone"] |= change
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ExportError, match=rf"config\.json|{tmp_path.name}: "):
        load_backbone(tmp_path)


def test_training_from_an_export_of_a_join_takes_its_first_part(files, index, tmp_path):
    write.export_backbone(
        load_backbone(f"{files[0]}@96+{files[2]}@64"), tmp_path / "backbone", ["safetensors"]
    )
    recipe = load_recipe(
        RECIPES / "my_images_small.toml", ["augment.crop_px=32", "tune.eval_crop_px=auto"]
    )
    part = load_backbone(f"{files[0]}@96")
    for folder in (tmp_path / "backbone", tmp_path):  # the folder that has it inside, too
        given = open_init(recipe, folder)
        assert given.config.weights_sha256 == part.config.weights_sha256
        assert given.view.config() == part.view.config()
        start = Start.find(given, index)
        resolved = with_init(recipe, given, index)
        assert resolved.tune.eval_crop_px == 96
        assert start.view(resolved, index, 32).crop_px == 96
        assert "96 px" in start.describe(resolved.tune)  # says which part


@pytest.mark.parametrize(("source", "px"), [("{}", 48), ("{}@80", 80)])
def test_the_evaluations_size_is_that_of_the_source(files, index, source, px):
    recipe = load_recipe(
        RECIPES / "my_images_small.toml", ["augment.crop_px=32", "tune.eval_crop_px=auto"]
    )
    given = open_init(recipe, source.format(files[0]))
    assert with_init(recipe, given, index).tune.eval_crop_px == px
