"""Folders and files as timm and torchvision write them, with their own views."""

import json
from functools import wraps

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models import save_for_hf

from sslpipe.errors import UserError
from sslpipe.export.load import load_backbone
from sslpipe.models.backbones import backbone_settings
from sslpipe.weights.views import timm_view
from tests.helpers.weights import difference, equals, init_of, noise, randomised, saved

VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def small_vit(**options):
    return randomised(timm.create_model("vit_base_patch16_224", **VIT, **options))


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("word", ["", "local-dir:"])
def test_a_folder_of_timm_is_read_with_its_own_view(tmp_path, safe, word):
    network = small_vit(img_size=64, num_classes=7)
    stated = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 0.8,
              "interpolation": "bilinear", "input_size": (3, 64, 64), "num_classes": 7}  # fmt: skip
    network.pretrained_cfg = {**network.pretrained_cfg, **stated}
    save_for_hf(network, tmp_path, model_args={**VIT, "img_size": 64}, safe_serialization=safe)
    model = load_backbone(f"{word}{tmp_path}")
    reference = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=0).eval()
    assert equals(model, reference)
    assert difference(model, reference, 64) <= 1e-5
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(reference))
    config = model.config.view
    assert (
        (config["crop_px"], config["resize_px"]) == (64, transform.transforms[0].size) == (64, 80)
    )
    assert config["mean"] == pytest.approx([0.1, 0.2, 0.3])
    assert config["std"] == pytest.approx([0.4, 0.5, 0.6])
    init = model.config.facts["init"]
    assert init["format"] == "timm"
    assert sorted(init["unexpected"]) == ["head.bias", "head.weight"]


def test_a_file_in_a_folder_of_timm_has_the_view_of_the_folder(tmp_path):
    network = randomised(timm.create_model("resnet10t"))
    network.pretrained_cfg = {**network.pretrained_cfg, "mean": (0.1, 0.2, 0.3)}
    save_for_hf(network, tmp_path, safe_serialization=True)
    file = tmp_path / "model.safetensors"
    named = f"timm/resnet10t@{file}"
    for source in (tmp_path, file, named):
        assert load_backbone(source).config.view["mean"] == pytest.approx([0.1, 0.2, 0.3])
    (tmp_path / "config.json").write_text('{"architecture": "resnet10t"}')
    assert any("no input_size, mean, std" in note for note in load_backbone(tmp_path).notes)
    (tmp_path / "config.json").write_text('{"batch_size": 8}')  # of another program
    assert load_backbone(named).config.view["mean"] != pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize("crop_pct", [0.9, 1.0, 1.15])
def test_images_are_those_of_timms_transform(crop_mode, crop_pct):
    """NFNets squash to more than they crop; VOLO's crop of 1.15 has a border, which is said."""
    stated = {"input_size": (3, 64, 64), "crop_pct": crop_pct, "crop_mode": crop_mode}
    view, notes = timm_view("x", stated).make("x", None)
    small = torch.rand(1, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    picture = (255 * torch.nn.functional.interpolate(small, (90, 140), mode="bilinear"))[0].byte()
    data = timm.data.resolve_data_config({}, pretrained_cfg=stated)
    image = torchvision.transforms.functional.to_pil_image(picture)
    theirs = timm.data.create_transform(**data)(image)
    ours = view(picture[None], torch.tensor([picture.shape[1:]]))[0]
    same = (ours - theirs).abs().max() <= 1.5 / 255 / min(data["std"])
    assert bool(same) == (crop_pct <= 1)
    assert any("border" in note for note in notes) != bool(same)


@pytest.mark.parametrize("model_type", ["vit", "nobodys"])
def test_a_network_that_the_user_names_is_not_that_of_transformers_beside_it(tmp_path, model_type):
    alone = tmp_path / "alone" / "model.safetensors"
    beside = tmp_path / "beside" / "model.safetensors"
    state = randomised(timm.create_model("resnet10t")).state_dict()
    for file in (alone, beside):
        file.parent.mkdir()
        save_file(state, file)
    config = {"model_type": model_type, "architectures": ["Any"], "image_size": 384}
    (beside.parent / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "ViTImageProcessor", "size": 384, "image_mean": [0.1] * 3}
    (beside.parent / "preprocessor_config.json").write_text(json.dumps(processor))
    first, second, third = (
        load_backbone(f"timm/resnet10t@{path}").config for path in (alone, beside, beside.parent)
    )
    assert first.view == second.view == third.view
    assert first.facts["init"]["format"] == second.facts["init"]["format"] == "state dict"


def test_a_folder_that_says_another_pooling_than_its_arguments_is_refused(tmp_path):
    """An average behind a plain norm: no tensor says so, and features of the token are others."""
    pooling = {"global_pool": "avg", "fc_norm": False}
    network = small_vit(img_size=64, num_classes=0, **pooling)
    save_for_hf(network, tmp_path, safe_serialization=True)
    assert difference(load_backbone(tmp_path), network.eval(), 64) <= 1e-5
    # earlier releases of timm wrote no arguments but those that they were given
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"] = {**VIT, "img_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"global_pool = 'avg', and .* by 'token'; .*fc_norm"):
        load_backbone(tmp_path)
    # by what the error says it is the user's own
    config["model_args"] |= pooling
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert difference(load_backbone(tmp_path), network.eval(), 64) <= 1e-5
    # a recipe that says nothing of it has the folder's, and its own word stands
    for own, is_another in (({}, False), ({"global_pool": "token"}, True)):
        component = backbone_settings("timm/vit_base_patch16_224", {**VIT, **own})
        model = load_backbone(tmp_path, component=component, crop_px=64)
        assert (difference(model, network, 64) > 1e-5) == is_another


def test_position_tables_are_resized_as_timm_does(tmp_path, monkeypatch):
    network = small_vit()
    path = saved(network.state_dict(), tmp_path)
    component = backbone_settings("timm/vit_base_patch16_224", VIT)
    model = load_backbone(path, component=component, crop_px=96)
    expected = resample_abs_pos_embed(network.pos_embed.detach(), [6, 6], num_prefix_tokens=1)
    assert torch.equal(model.backbone.network.pos_embed, expected)
    init = model.config.facts["init"]
    assert (init["resized"], init["missing"]) == (["pos_embed"], [])
    own = model.backbone.network.state_dict()
    assert all(own[k].equal(t) for k, t in network.state_dict().items()
               if k in own and k != "pos_embed")  # fmt: skip

    # torchvision's own table, too
    @wraps(torchvision.models.vit_b_32)
    def small(weights, image_size=224):
        return torchvision.models.VisionTransformer(image_size, 32, 1, 2, 32, 32)

    monkeypatch.setitem(torchvision.models._api.BUILTIN_MODELS, "vit_b_32", small)
    large = randomised(small(None))
    path = saved(large.state_dict(), tmp_path, "vit_b_32.pth")
    model = load_backbone(f"torchvision/vit_b_32@{path}", crop_px=96)
    table = large.encoder.pos_embedding.detach()
    expected = resample_abs_pos_embed(table, [3, 3], num_prefix_tokens=1)
    assert torch.equal(model.backbone.network.encoder.pos_embedding, expected)
    assert model.config.facts["init"]["resized"] == ["encoder.pos_embedding"]
    with pytest.raises(ValueError, match="use a crop of 96 px"):
        load_backbone(f"torchvision/vit_b_32@{path}", crop_px=97)


def test_a_release_of_torchvision_is_known_by_its_hash(tmp_path, monkeypatch):
    path = saved(torchvision.models.resnet18().state_dict(), tmp_path)
    unknown = init_of(f"torchvision/resnet18@{path}")
    assert "the source names none" in unknown["notes"][0]

    class Release:  # torchvision names its files by the first digits of their sha256
        url = f"https://download.pytorch.org/models/resnet18-{unknown['sha256'][:8]}.pth"
        transforms = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.transforms

    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda name: [Release])
    model = load_backbone(f"torchvision/resnet18@{path}")
    assert (model.view.crop_px, model.view.resize_px) == (224, 232)
    assert model.config.facts["init"]["notes"] == []
    assert load_backbone(f"torchvision/resnet18@{path}", crop_px=112).view.resize_px == 112


def test_half_precision_and_old_files_are_read(tmp_path):
    network = randomised(torchvision.models.resnet18())
    half = {k: t.half() if t.is_floating_point() else t for k, t in network.state_dict().items()}
    model = load_backbone(saved(half, tmp_path), crop_px=32)
    own = model.backbone.network.state_dict()
    assert all(own[key].equal(half[key].float()) for key in own if half[key].dtype == torch.half)
    # before torch 0.4.1, BatchNorm counted no batches
    old = {k: t for k, t in network.state_dict().items() if "num_batches" not in k}
    torch.save(old, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    model = load_backbone(tmp_path / "old.pth", crop_px=32)
    init = model.config.facts["init"]
    assert init["loaded"] == 100
    assert len(init["missing"]) == 20
    assert all("num_batches_tracked" in key for key in init["missing"])


def test_a_network_of_grey_images_sees_them_in_rgb_as_before(tmp_path):
    network = small_vit(img_size=64, in_chans=1, num_classes=0)
    network.pretrained_cfg = {**network.pretrained_cfg, "mean": (0.2,), "std": (0.3,),
                              "input_size": (1, 64, 64)}  # fmt: skip
    arguments = {**VIT, "img_size": 64, "in_chans": 1}
    save_for_hf(network, tmp_path, model_args=arguments, safe_serialization=True)
    model = load_backbone(tmp_path)
    grey = noise(64)[:, :1]
    ours, theirs = model(grey.expand(-1, 3, -1, -1)), network(grey)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert model.view.mean.tolist() == pytest.approx([0.2] * 3)
    assert model.config.facts["init"]["resized"] == ["patch_embed.proj.weight"]
    # other numbers of channels mean something else, and only data of as many say what
    weight = torch.ones(64, 4, 7, 7)
    state = {**torchvision.models.resnet18().state_dict(), "conv1.weight": weight}
    model = load_backbone(f"torchvision/resnet18@{saved(state, tmp_path)}")
    with pytest.raises(UserError, match="sees 4 channels, and nothing says which"):
        model.encode(noise(64))


def test_a_learned_pooling_of_the_recipe_starts_anew(tmp_path):
    network = randomised(torchvision.models.resnet18())
    component = backbone_settings("torchvision/resnet18", {"stem": "imagenet", "pool": "gem"})
    path = saved(network.state_dict(), tmp_path)
    model = load_backbone(path, component=component, crop_px=64)
    own, theirs = model.backbone.network.state_dict(), network.state_dict()
    assert float(own.pop("avgpool.pooling_p")) == 3
    assert all(own[key].equal(theirs[key]) for key in own)
