"""Each format by the libraries of those who will load it, beside the model in memory."""

import importlib
import importlib.util
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import sslpipe
import sslpipe.cli.export
from sslpipe.api import train
from sslpipe.data.index import load_index
from sslpipe.errors import ExportError
from sslpipe.evaluation.suite_file import content_sha256
from sslpipe.export import formats, onnx_files
from sslpipe.export.load import load_run
from sslpipe.export.verify import READERS, read
from sslpipe.export.write import FORMATS, TOLERANCE, export_backbone, refusals, usage_lines
from sslpipe.portable import sha256_of
from sslpipe.recipe.reading import load_recipe
from tests.evaluation.test_verdict import compared
from tests.export.test_write import break_format, flip_a_convolution
from tests.helpers.dataset import write_dataset
from tests.helpers.exports import VIEW, features, trained, tree
from tests.helpers.runs import RECIPE, resolved, write_recipe
from tests.helpers.weights import randomised, saved

ROOT = Path(__file__).parents[2]
PROGRAMS = ("onnx", "pt2")
pytestmark = pytest.mark.usefixtures("proved_here")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """A ResNet-18 with the ImageNet stem, which every format can hold."""
    model = trained("torchvision/resnet18", stem="imagenet")
    out = tmp_path_factory.mktemp("resnet") / "export"
    assert list(export_backbone(model, out, ["all"])) == list(FORMATS)
    return model, out


VIT = "timm/vit_tiny_patch16_224"
SMALL_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 8,
}
DINO = {"model_type": "dinov2", "image_size": 32, **SMALL_VIT}
PLAIN_VIT = {"model_type": "vit", "image_size": 64, **SMALL_VIT}  # views are of 32 px
CONVNEXT = {"model_type": "convnext", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
NO_LIBRARY = ["torchvision", "timm", "hf"]


@pytest.mark.promise(7)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11's
@pytest.mark.parametrize(
    ("kind", "arguments", "refused", "traced"),
    [
        ("small_resnet", {"pool": "gem"}, ["torchvision", "timm", "hf"], False),
        ("timm/resnet10t", {}, ["torchvision"], False),
        ("timm/resnet10t", {"embedding_dim": 6, "normalize": True}, ["torchvision"], False),
        ("timm/resnet10t", {"normalize": True}, ["torchvision"], False),
        ("torchvision/resnet18", {"embedding_dim": 6, "stem": "imagenet"}, ["torchvision"], False),
        (VIT, {"depth": 1, "embedding_dim": 6}, ["torchvision"], False),
        pytest.param(
            *("timm/resnet10t", {"embedding_dim": 6, "embedding_taps": ["layer2"]}),
            *(["torchvision", "timm", "hf"], True),
            marks=pytest.mark.slow,
        ),
        (VIT, {"depth": 1}, ["torchvision"], False),
        ("transformers", {"config": DINO}, ["torchvision", "timm"], False),
        ("transformers", {"config": DINO, "normalize": True}, ["torchvision", "timm"], False),
        ("transformers", {"config": PLAIN_VIT}, ["torchvision", "timm"], False),
        ("transformers", {"config": CONVNEXT}, ["torchvision", "timm"], False),
        *(
            ("transformers", {"config": DINO, "embedding_dim": 6}, NO_LIBRARY, False),
            ("torchvision/resnet18", {"stem": "small"}, NO_LIBRARY, False),
            ("torchvision/mobilenet_v3_small", {}, ["timm", "hf"], False),
        ),
        pytest.param(VIT, {"depth": 1}, ["torchvision"], True, marks=pytest.mark.slow),
    ],
)
def test_all_is_every_format_that_can_hold_the_backbone_and_each_gives_its_features(
    tmp_path, monkeypatch, kind, arguments, refused, traced
):
    """Programs are traced, which takes seconds, in the tests below; a join has a transformer."""
    if not traced:
        for name in PROGRAMS:
            monkeypatch.delitem(FORMATS, name)
    model = trained(kind, **arguments)
    assert list(refusals(model)) == refused
    written = export_backbone(model, tmp_path / "out", ["all"])
    assert list(written) == [name for name in FORMATS if name not in refused]
    torch.manual_seed(2)
    images = torch.randn(5, 3, 32, 32)  # a batch size that neither tracing nor the proof has seen
    with torch.no_grad():
        expected = model(images)
        for name in written:
            for network in read(name, tmp_path / "out"):
                actual = network(images)
                if arguments.get("normalize") and name in ("timm", "hf"):  # left to the user
                    actual = F.normalize(actual, dim=1)
                error = float((actual - expected).abs().max() / expected.abs().max())
                assert error <= TOLERANCE, (name, error)
    readers = {
        "torchvision": {"torchvision"},
        "timm": {"timm"},
        "hf": {"timm", "transformers"},
        "onnx": {"onnx", "onnxruntime"},
    }
    if kind == "transformers":
        readers["hf"] = {"transformers"}
    named = {"sslpipe", "torch", kind.partition("/")[0]} - {"small_resnet"}
    named.update(*(readers.get(name, ()) for name in written))
    versions = {name: importlib.import_module(name).__version__ for name in named}
    assert versions_in_card(tmp_path / "out" / "README.md") == {
        name: full if name in ("sslpipe", "torch") else full.partition("+")[0]  # less "+cu130"
        for name, full in versions.items()
    }
    for name in {"safetensors", "timm", "hf"} & set(written):
        folder = tmp_path / "out" / ("" if name == "safetensors" else name)
        assert torch.equal(features(sslpipe.load_backbone(folder)), features(model))


def versions_in_card(file):
    (row,) = re.findall(r"^\| written and proved by \| (.*) \|$", file.read_text(), re.MULTILINE)
    return dict(each.split() for each in row.split(", "))


def test_the_help_names_every_format():
    command, _ = resolved("export")
    (help,) = (param.help for param in command.params if param.name == "format")
    assert sorted(re.split(", | or ", help.partition(", separated")[0])) == sorted(FORMATS)


def test_a_card_names_the_libraries_of_its_own_formats(resnet):
    _, out = resnet
    hub = {"sslpipe", "torch", "torchvision", "timm", "transformers"}
    assert set(versions_in_card(out / "hf" / "README.md")) == hub
    assert set(versions_in_card(out / "README.md")) == hub | {"onnx", "onnxruntime"}


def test_two_exports_are_the_same_bytes_and_tell_no_folder_of_this_machine(tmp_path):
    found = []
    for name in ("one", "two"):
        model = trained(widths=[8], pool="gem", embedding_dim=6, normalize=True)
        export_backbone(model, tmp_path / name, ["all"])
        files = (path for path in (tmp_path / name).rglob("*.*"))
        found.append({str(p.relative_to(tmp_path / name)): p.read_bytes() for p in files})
    model, config = "model.safetensors", "config.json"
    assert set(found[0]) == {
        *("README.md", config, model, "model.onnx", "model.pt2"),
    }
    hub = []
    for name in ("three", "four"):
        export_backbone(trained("timm/resnet10t", embedding_dim=6), tmp_path / name, ["hf"])
        files = (path for path in (tmp_path / name).rglob("*.*"))
        hub.append({str(p.relative_to(tmp_path / name)): p.read_bytes() for p in files})
    assert set(hub[0]) == {"README.md", "hf/README.md", f"hf/{config}", f"hf/{model}"}
    assert hub[0] == hub[1]
    found[0] |= {f"hub/{name}": raw for name, raw in hub[0].items()}
    found[1] |= {f"hub/{name}": raw for name, raw in hub[1].items()}
    assert found[0] == found[1]
    for name, raw in found[0].items():
        for place in (str(ROOT), str(Path(torch.__file__).parent.parent), str(Path.home()), '.py"'):
            assert place.encode() not in raw, (name, place)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11's
def test_the_lines_of_the_page_and_the_model_card_load_each_format(
    resnet, tmp_path, monkeypatch, capsys
):
    model, out = resnet
    blocks = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.S)
    assert len(blocks) == len(FORMATS) == len(READERS)
    page = (ROOT / "docs" / "export.md").read_text()
    for name, block in zip(FORMATS, blocks, strict=True):
        usage = usage_lines(name, model).replace("ARCHITECTURE", "resnet18")
        assert usage in page, name
        assert usage.replace("S, S", "32, 32").replace("B, F", "B, 512") == block
    # USER/NAME is downloaded, and there is no network
    repo, revision = tmp_path / "models--USER--NAME", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / revision).symlink_to(out / "hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    images = torch.full((2, 3, 32, 32), 0.5)
    with torch.no_grad():
        expected = model(images).numpy()
    hub = re.findall(r"```python\n(.*?)```", (out / "hf" / "README.md").read_text(), re.S)
    assert [text.splitlines()[0] for text in hub] == [
        "import transformers",
        "import timm",
        "import sslpipe",
    ]
    assert "FOLDER" not in "".join(hub)
    for block in [*blocks, *hub]:
        given = {"images": images}
        if "session" in block:
            given["images"] = images.numpy()
        elif "encode" in block:
            given["images"] = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8)
        exec(block.replace("FOLDER", str(out)), given)
        if any(word in block for word in ("onnx", "torch.export", "transformers")):
            assert np.asarray(given["features"].data) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert (
        "_IncompatibleKeys(missing_keys=['fc.weight', 'fc.bias'], unexp" in capsys.readouterr().out
    )


def test_timm_makes_the_input_that_the_features_need_from_its_config(resnet):
    model, out = resnet
    network = timm.create_model(f"local-dir:{out}/timm", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    row = np.linspace(0, 255, 60)
    pixels = np.stack([row[None] + 0 * row[:45, None], 0 * row[None] + row[:45, None]] * 2)[:3]
    image = Image.fromarray(pixels.transpose(1, 2, 0).round().astype(np.uint8))  # (45, 60) smooth
    raw = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None]
    ours = model.view(raw, torch.tensor([raw.shape[-2:]]))
    # Pillow rounds to whole levels after each of two passes: at most 1.1 of 255, over std
    bound = 1.1 / 255 / min(VIEW.config()["std"])
    assert float((transform(image)[None] - ours).abs().max()) < bound


def test_timm_resizes_to_the_side_of_the_view_whatever_its_share_is_rounded_to():
    for crop_px in range(8, 520):
        for resize_px in range(crop_px, crop_px + 60):  # as timm computes it: (68, 100) gave 99
            share = formats._crop_pct(crop_px, resize_px)
            assert math.floor(crop_px / share) == resize_px, (crop_px, resize_px)
    assert formats._crop_pct(224, 224) == 1


def forget_statistics(path) -> None:
    tensors = load_file(path)
    tensors |= {k: torch.ones_like(t) for k, t in tensors.items() if k.endswith("running_var")}
    save_file(tensors, path)


def drop_a_tensor(path) -> None:
    save_file({k: t for k, t in load_file(path).items() if k != "bn1.running_mean"}, path)


def negate_a_kernel(path) -> None:
    proto = onnx.load(path)
    kernel = next(tensor for tensor in proto.graph.initializer if len(tensor.dims) == 4)
    kernel.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(kernel), kernel.name))
    onnx.save(proto, path)


def change_strides(path) -> None:  # the right tensors, for another network: only features tell
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_args": {"output_stride": 8}}))


def normalise_in_ours(path) -> None:  # what timm's reader passes over, and `load_backbone` takes
    config = json.loads((path / "config.json").read_text())
    config["sslpipe"]["backbone"]["normalize"] = True
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.promise(7)
@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("torchvision", flip_a_convolution, "features in a clean process differ by"),
        ("torchvision", forget_statistics, "differ by"),
        ("torchvision", drop_a_tensor, "missing"),
        ("onnx", negate_a_kernel, "differ by"),
        ("hf", lambda path: forget_statistics(path / "model.safetensors"), "not those that config"),
        ("timm", change_strides, "differ by"),
        ("timm", normalise_in_ours, r"\(reader 2\)"),
    ],
)
def test_a_damaged_format_is_an_error_and_leaves_no_file(
    tmp_path, monkeypatch, name, damage, message
):
    break_format(monkeypatch, name, damage)
    small = name == "onnx"  # whose tracing takes seconds
    model = trained(widths=[8]) if small else trained("torchvision/resnet18", stem="imagenet")
    with pytest.raises(ExportError, match=message):
        export_backbone(model, tmp_path / "out", [name])
    assert tree(tmp_path) == []


@pytest.mark.parametrize("name", ["onnx", "pt2"])
def test_a_program_with_a_fixed_batch_size_is_an_error_and_leaves_no_file(
    tmp_path, monkeypatch, name
):
    monkeypatch.setattr(formats, "free_batch", lambda: None)
    monkeypatch.setattr(onnx_files, "free_batch", lambda: None)
    with pytest.raises(Exception, match=r"Expected: 2|shape\[0\] to be equal to 2|equal 2|== 2"):
        export_backbone(trained(widths=[8]), tmp_path / "out", [name])
    assert tree(tmp_path) == []


def test_without_its_packages_onnx_is_one_clear_error_and_all_leaves_it_out(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name)
    )
    monkeypatch.delitem(FORMATS, "pt2")  # to trace takes seconds
    model = trained()
    with pytest.raises(ExportError, match=r"it needs onnxscript: pip install .*\[onnx\]'"):
        export_backbone(model, tmp_path / "out", ["onnx"])
    assert "onnx" in refusals(model)
    assert "onnx" not in export_backbone(model, tmp_path / "out", ["all"])


ATTACK = "a | <b>b</b>\n# c"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run of two steps with an eval.json of its weights, under a name that attacks."""
    folder = tmp_path_factory.mktemp("evaluated")
    data = write_dataset(folder / "data")
    network = 'kind = "torchvision/resnet18"\nstem = "imagenet"\n'
    text = RECIPE.replace('kind = "small_resnet"\nwidths = [8, 16, 16]\n', network)
    recipe = load_recipe(write_recipe(folder, text), ["steps=2"])
    train(recipe, load_index(data), folder / "run")
    row = {"features": "ssl", "whitened": False, "column": "kNN", "protocol": "knn k=20"}
    row |= {"value": 0.5, "interval95": [0.4, 0.6], "queries": 40, "bank": 80, "metric": "top1"}
    row |= {"details": {"confusion": [[1]]}}
    rows = [
        row,
        {**row, "whitened": True, "value": 0.525},
        {**row, "column": None, "protocol": "knn k=200", "value": 0.55},
        {**row, "features": "pixels", "value": 0.25},
        {**row, "features": "lite|0", "value": 0.375},
        {**row, "metric": "effective_rank", "value": 12.5, "interval95": [11, 14]}
        | {"unit": "number", "protocol": "geometry"},
    ]
    against = {"name": "lite|0", "source": "/home/ann/lite.pth", "sha256": "ab" * 32}
    facts = {"data": ATTACK, "data_sha256": "e" * 64, "split": "test", "train_split": "train"}
    facts["backbone_sha256"] = load_run(folder / "run").config.weights_sha256
    facts["against"] = [{**against, "format": "timm"}]
    suite = {"schema_version": 1, "facts": facts, "columns": ["kNN"], "rows": rows, "left_out": []}
    suite["against"] = [compared(against="lite|0")]
    suite["sha256"] = content_sha256(suite)
    (folder / "run" / "eval.json").write_text(json.dumps(suite))
    return folder / "run"


def test_the_card_holds_the_measured_numbers_and_their_protocols(evaluated, tmp_path):
    model = load_run(evaluated)
    out = tmp_path / "out"
    export_backbone(model, out, ["hf"])
    card = ModelCard.load(out / "hf" / "README.md")  # the Hub's own parser
    assert card.data.library_name == "timm"
    assert card.data.pipeline_tag == "image-feature-extraction"
    assert card.data.tags == ["self-supervised-learning", "contrastive-learning", "sslpipe"]
    for text in (
        "| tiny | no | knn k=20 | top1 | 50.0% | 40.0% to 60.0% | 40 | 80 |",
        "| pixels | no |",
        "| 12.5 | 11 to 14 |",
        "`tiny` is this backbone; `pixels` and `random`",
    ):
        assert text in card.text
    assert "ssl" not in re.findall(r"\w+", card.text)  # eval.json's word for it
    assert "\nBetter than lite\\|0: kNN 70.0 against 62.0 %" in card.text
    assert "| lite\\|0 | no | knn k=20 | top1 | 37.5% |" in card.text
    assert f"`lite\\|0` are the weights with sha256 `{'ab' * 8}` (timm)" in card.text
    assert "/home/ann" not in card.text + (out / "hf" / "config.json").read_text()
    assert "<b>" not in card.text
    assert "\n# c" not in card.text
    again = sslpipe.load_backbone(out / "hf")
    assert again.config.facts["step"] == 2


def test_numbers_of_other_weights_are_omitted_and_the_card_says_so(evaluated, tmp_path):
    run_dir = shutil.copytree(evaluated, tmp_path / "run")
    suite = json.loads((run_dir / "eval.json").read_text())
    suite["facts"]["backbone_sha256"] = "0" * 64
    suite["sha256"] = content_sha256(suite)
    (run_dir / "eval.json").write_text(json.dumps(suite))
    export_backbone(load_run(run_dir), tmp_path / "out", ["hf"])
    for card in ("README.md", "hf/README.md"):
        text = (tmp_path / "out" / card).read_text()
        assert "eval.json is not of these weights" in text
        assert "50.0%" not in text


def test_weights_of_another_program_are_exported_on_with_all_that_is_known_of_them(tmp_path):
    network = randomised(timm.create_model("mobilenetv3_small_050"))
    file = saved(network.state_dict(), tmp_path)
    source = f"timm/mobilenetv3_small_050.lamb_in1k@{file}"
    first, second = tmp_path / "first", tmp_path / "second"
    for given, out, names in (
        (source, first, ("safetensors", "timm")),
        (first / "timm", second, ()),
    ):
        words = ["export", str(given), "--out", str(out)]
        words += [word for name in names for word in ("--format", name)]
        result = CliRunner().invoke(sslpipe.cli.export.app, words)
        assert result.exit_code == 0, result.output
        card = (out / "README.md").read_text()
        assert "another program trained" in card
        assert "self-supervised contrastive learning" not in card
        assert f"sha256 `{sha256_of(file)[:16]}`" in card
        assert "bicubic, antialiased" in card
        (row,) = re.findall(r"larger images .* (\d+) px first", card)
        assert int(row) == sslpipe.load_backbone(out).view.canvas_px  # to which `encode` decodes
    original = sslpipe.load_backbone(source)
    init = original.config.facts["init"]
    assert (init["source"], init["sha256"]) == (source, sha256_of(file))
    state = original.backbone.state_dict()
    for place in (first, first / "timm", second):
        again = sslpipe.load_backbone(place)
        assert again.config.facts["init"] == init
        assert again.config.view == original.config.view
        assert again.config.view["interpolation"] == "bicubic"
        assert all(torch.equal(t, state[key]) for key, t in again.backbone.state_dict().items())
    stated = json.loads((first / "timm" / "config.json").read_text())["pretrained_cfg"]
    assert (stated["interpolation"], stated["crop_mode"]) == ("bicubic", "center")
    crop_px = original.view.crop_px
    assert stated["input_size"] == [3, crop_px, crop_px]
    assert stated["mean"] == pytest.approx(original.view.mean.tolist())


def test_the_hubs_folder_loads_by_transformers_with_the_embedding_as_its_logits(tmp_path):
    transformers = pytest.importorskip("transformers")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plain = trained("timm/resnet10t")
    export_backbone(plain, tmp_path / "plain", ["hf"])
    network = transformers.AutoModel.from_pretrained(tmp_path / "plain" / "hf").eval()
    tuned = trained("timm/resnet10t", embedding_dim=6, normalize=True)
    export_backbone(tuned, tmp_path / "tuned", ["hf"])
    by_classes = transformers.AutoModelForImageClassification
    head = by_classes.from_pretrained(tmp_path / "tuned" / "hf").eval()
    with torch.no_grad():
        torch.testing.assert_close(network(images).pooler_output, plain(images))
        torch.testing.assert_close(F.normalize(head(images).logits, dim=1), tuned(images))


def test_what_transformers_trained_further_names_the_key_without_which_it_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    export_backbone(trained("timm/resnet10t"), tmp_path / "plain", ["hf"])
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    cases = {"AutoModel": {}, "AutoModelForImageClassification": {"num_labels": 5}}
    for name, arguments in cases.items():
        folder = tmp_path / name
        model = getattr(transformers, name).from_pretrained(tmp_path / "plain" / "hf", **arguments)
        randomised(model).eval().save_pretrained(folder)
        with pytest.raises(ExportError, match=r"remove the key 'sslpipe' from config\.json"):
            sslpipe.load_backbone(folder)
        config = json.loads((folder / "config.json").read_text())
        del config["sslpipe"]
        (folder / "config.json").write_text(json.dumps(config))
        network = model.timm_model
        with torch.no_grad():
            pooled = network.forward_head(network.forward_features(images), pre_logits=True)
            torch.testing.assert_close(sslpipe.load_backbone(folder)(images), pooled)
