"""Folders of transformers and open_clip: features as their own models give, views as they say."""

import json
import os

import open_clip
import pytest
import torch
import transformers as hf
from open_clip.transform import PreprocessCfg, image_transform_v2
from safetensors.torch import load_file, save_file
from torchvision.transforms.functional import to_pil_image
from transformers.utils import logging

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import RecipeError, WeightsError
from sslpipe.export.load import load_backbone
from sslpipe.export.write import export_backbone
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.weights.huggingface import open_clip_view, transformers_view
from tests.helpers.weights import difference, init_of, randomised, saved

pytestmark = pytest.mark.usefixtures("proved_here")

SIDES = {"image_size": 32, "patch_size": 8}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
       "intermediate_size": 64, **SIDES}  # fmt: skip
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
        "window_size": 4}  # fmt: skip
RESNET = {**STAGES, "embedding_size": 8, "layer_type": "basic"}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "vocab_size": 50}  # fmt: skip
DECODER = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
           "decoder_num_attention_heads": 2, "decoder_intermediate_size": 16}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def pooled(output):
    return output.pooler_output.flatten(1)


def class_token(output):
    return output.last_hidden_state[:, 0]


def mean(output):
    return output.last_hidden_state.mean(dim=1)


def encoder(network):
    return network.base_model


def of_images(network):
    return network.vision_model


def itself(network):
    return network


# name -> class, its configuration, the part of it that sees images, its features
MODELS = {
    "dinov3_vit": (hf.DINOv3ViTModel, hf.DINOv3ViTConfig(**VIT), itself, pooled),
    "dinov3_convnext": (
        hf.DINOv3ConvNextModel, hf.DINOv3ConvNextConfig(**STAGES), itself, pooled
    ),
    "dinov2": (hf.Dinov2Model, hf.Dinov2Config(**VIT), itself, class_token),
    "dinov2, SwiGLU": (
        hf.Dinov2Model, hf.Dinov2Config(**VIT, use_swiglu_ffn=True), itself, class_token
    ),
    "dinov2 with registers": (
        hf.Dinov2WithRegistersModel, hf.Dinov2WithRegistersConfig(**VIT), itself, class_token
    ),
    "clip": (
        hf.CLIPModel, hf.CLIPConfig(vision_config=VIT, text_config=TEXT), of_images, pooled
    ),
    "clip, the vision tower": (hf.CLIPVisionModel, hf.CLIPVisionConfig(**VIT), itself, pooled),
    "siglip": (
        hf.SiglipModel, hf.SiglipConfig(vision_config=VIT, text_config=TEXT), of_images, pooled
    ),
    "swin": (hf.SwinModel, hf.SwinConfig(**SWIN), itself, pooled),
    "swin, a classifier": (
        hf.SwinForImageClassification, hf.SwinConfig(**SWIN), encoder, pooled
    ),
    "swinv2": (hf.Swinv2Model, hf.Swinv2Config(**SWIN), itself, pooled),
    "resnet": (hf.ResNetModel, hf.ResNetConfig(**RESNET), itself, pooled),
    "resnet, a classifier": (
        hf.ResNetForImageClassification, hf.ResNetConfig(**RESNET), encoder, pooled
    ),
    "convnext": (hf.ConvNextModel, hf.ConvNextConfig(**STAGES), itself, pooled),
    "convnextv2": (
        hf.ConvNextV2ForImageClassification, hf.ConvNextV2Config(**STAGES), encoder, pooled
    ),
    "beit": (hf.BeitModel, hf.BeitConfig(**VIT), itself, pooled),
    "vit": (hf.ViTModel, hf.ViTConfig(**VIT), itself, class_token),
    "vit, a classifier": (
        hf.ViTForImageClassification, hf.ViTConfig(**VIT), encoder, class_token
    ),
    "deit": (hf.DeiTModel, hf.DeiTConfig(**VIT), itself, class_token),
    "vit_msn": (hf.ViTMSNModel, hf.ViTMSNConfig(**VIT), itself, class_token),
    "ijepa": (hf.IJepaModel, hf.IJepaConfig(**VIT), itself, mean),
    "vit_mae": (
        hf.ViTMAEForPreTraining, hf.ViTMAEConfig(**VIT, **DECODER, mask_ratio=0.0), encoder,
        class_token,
    ),
    "levit": (hf.LevitModel, hf.LevitConfig(image_size=64), itself, pooled),
}  # fmt: skip


def written(name, folder):
    """A folder of a model with random weights, and the model."""
    kind, config, *_ = MODELS[name]
    network = randomised(kind(config))
    network.save_pretrained(folder)
    return network


@pytest.mark.promise(10)
@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_of_transformers_own_model(tmp_path, name):
    _, _, part, features = MODELS[name]
    network = part(written(name, tmp_path))
    model = load_backbone(tmp_path)
    side = model.view.crop_px
    assert difference(model, lambda images: features(network(images)), side) <= 1e-5
    init = model.config.facts["init"]
    assert (init["format"], init["missing"], init["resized"]) == ("transformers", [], [])
    assert init["loaded"] == len(model.backbone.network.state_dict())
    assert any("before visual_projection" in note for note in model.notes) == (name == "clip")
    # each tensor of the file is loaded or listed
    own = load_file(tmp_path / "model.safetensors").keys()
    if name != "vit_mae":  # the keys of its decoder are renamed before they are left
        assert {*init["unexpected"]} <= {*own} | {key.partition(".")[2] for key in own}
    new = ("mask_token" in " ".join(model.backbone.network.state_dict())) and name == "vit_mae"
    if "SwiGLU" not in name:  # whose tensors its files have joined
        assert init["loaded"] + len(init["unexpected"]) == len(own) + new


@pytest.mark.parametrize("name", ["dinov3_vit", "clip", "swin", "resnet"])
def test_an_export_is_the_network_again_also_by_onnxruntime(tmp_path, name):
    written(name, tmp_path / "folder")
    model = load_backbone(tmp_path / "folder", crop_px=32)
    export_backbone(model, tmp_path / "out", ["safetensors", "onnx"])
    again = load_backbone(tmp_path / "out")
    assert difference(again, model, 32) == 0
    assert again.config.backbone == model.config.backbone
    # from a recipe, with random weights
    backbone = build_backbone(model.config.backbone, crop_px=32)
    assert backbone.num_features == model.num_features
    assert backbone(torch.zeros(2, 3, 32, 32)).requires_grad


def test_what_a_vit_of_the_hf_format_pools_are_the_features(tmp_path):
    """Its dense pooler is omitted; without one in the file, transformers draws one each time."""
    written("vit", tmp_path)
    model = load_backbone(tmp_path)
    export_backbone(model, tmp_path / "out", ["hf"])
    theirs = hf.AutoModel.from_pretrained(tmp_path / "out" / "hf").eval()
    side = model.view.crop_px
    assert difference(model, lambda images: theirs(images).pooler_output, side) <= 1e-5
    again = load_backbone(tmp_path / "out" / "hf")
    assert again.config.weights_sha256 == model.config.weights_sha256


@pytest.mark.parametrize("name", ["vit", "clip", "dinov2", "dinov3_vit", "swin"])
def test_other_sizes_are_seen_as_the_model_itself_does(tmp_path, name):
    network = MODELS[name][2](written(name, tmp_path))
    model = load_backbone(f"{tmp_path}@64")
    assert model.view.crop_px == 64
    options = {} if "dino" in name else {"interpolate_pos_encoding": True}

    def features(images):
        return MODELS[name][3](network(images, **options))

    assert difference(model, features, 64) <= 1e-5


def test_names_of_other_versions_are_read(tmp_path):
    """What transformers renames when it loads: LayerNorm's gamma and beta; a prefix of its own."""
    network = written("resnet, a classifier", tmp_path)
    plain = {key.removeprefix("resnet."): t for key, t in network.state_dict().items()}
    save_file(plain, tmp_path / "model.safetensors")
    model = load_backbone(tmp_path, crop_px=32)
    assert difference(model, lambda x: pooled(network.resnet(x)), 32) <= 1e-5


def test_pickled_weights_are_read_without_running_code(tmp_path):
    network = written("vit", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    assert difference(load_backbone(tmp_path), lambda x: class_token(network(x)), 32) <= 1e-5

    class Malice:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/was_here",)

    torch.save({"embeddings.cls_token": Malice()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="asks to run code"):
        load_backbone(tmp_path)
    assert not (tmp_path / "was_here").exists()


def test_code_kernels_and_quantised_weights_of_a_hub_are_not_used(tmp_path):
    network = written("vit", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    code = {"auto_map": {"AutoModel": "modeling.Evil"}, "_attn_implementation": "a/kernel",
            "attn_implementation": "someone/kernel"}  # fmt: skip
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')")
    (tmp_path / "config.json").write_text(json.dumps({**config, **code}))
    model = load_backbone(tmp_path)
    assert difference(model, lambda x: class_token(network(x)), 32) <= 1e-5
    assert not {*code} & {*model.config.backbone.arguments["config"]}
    for changes, said in (
        ({"model_type": "evil"}, "no model_type 'evil'.*code of a hub is not run"),
        ({"model_type": "bert"}, "takes no images"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
        ({"use_pretrained_backbone": True}, "use_pretrained_backbone"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **code, **changes}))
        with pytest.raises(WeightsError, match=said):
            load_backbone(tmp_path)
    assert not (tmp_path / "was_here").exists()


@pytest.mark.promise(10)
@pytest.mark.parametrize("change", ["missing", "shape", "not finite", "another size"])
def test_less_than_the_whole_model_is_refused(tmp_path, change):
    written("dinov3_vit", tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    key = next(key for key in state if key.endswith("norm1.weight"))
    if change == "missing":
        del state[key]
    elif change == "shape":
        state[key] = torch.ones(7)
    elif change == "not finite":
        state[key] = torch.full_like(state[key], float("nan"))
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    save_file(state, file)
    with pytest.raises(WeightsError, match=key if change != "another size" else "missing"):
        load_backbone(tmp_path)


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    written("vit", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(WeightsError, match=r"pip install .*\[hf\]'"):
        load_backbone(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "open_clip", None)
    with pytest.raises(RecipeError, match=r"pip install .*\[open_clip\]'"):
        build_backbone(backbone_settings(kind="open_clip/ViT-B-32"), crop_px=32)


SEVEN_EIGHTHS = {"crop_pct": 0.875, "resample": 3}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        # ViT squashes; ConvNeXt crops below 384 px and squashes from there on; Bit crops
        ({"size": {"height": 32, "width": 32}, "resample": 2}, (32, 32, "bilinear", True)),
        ({"size": {"shortest_edge": 224}, **SEVEN_EIGHTHS}, (224, 256, "bicubic", False)),
        ({"size": {"shortest_edge": 384}, **SEVEN_EIGHTHS}, (384, 384, "bicubic", True)),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224},
             "do_center_crop": True, "resample": 3},
            (224, 256, "bicubic", False),
        ),
        ({"size": 48, "resample": 2}, (48, 48, "bilinear", True)),
    ],
    ids=["vit", "convnext", "convnext, 384 px", "bit", "old"],
)  # fmt: skip
def test_the_view_is_that_of_its_preprocessor(stated, expected):
    stated = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], **stated}
    view, notes = transformers_view("x", {}, stated).make("x", None)
    assert (view.crop_px, view.resize_px, view.interpolation, view.squash) == expected
    assert view.mean.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert view.std.tolist() == pytest.approx([0.4, 0.5, 0.6])
    assert notes == []


ONE_TO_ONE = {"size": {"height": 32, "width": 32}, "resample": 2}
OFTEN_SCALED = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], **ONE_TO_ONE}


@pytest.mark.parametrize(
    "name",
    [
        *("clip", "vit", "bit", "convnext", "deit", "levit", "efficientnet"),
        *("offset", "no mean", "bytes", "to 2"),
    ],
)
def test_images_are_those_of_the_folders_own_image_processor(tmp_path, name):
    processor = {
        "clip": hf.CLIPImageProcessor(
            size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}
        ),
        "vit": hf.ViTImageProcessor(size={"height": 32, "width": 32}),
        "bit": hf.BitImageProcessor(
            size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}
        ),
        "convnext": hf.ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.875),
        "deit": hf.DeiTImageProcessor(
            size={"height": 40, "width": 40}, crop_size={"height": 32, "width": 32}
        ),
        "levit": hf.LevitImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        "efficientnet": hf.EfficientNetImageProcessor(include_top=True, **OFTEN_SCALED),
        "offset": hf.EfficientNetImageProcessor(
            include_top=False, rescale_offset=True, rescale_factor=1 / 127.5, **OFTEN_SCALED
        ),
        "no mean": hf.ViTImageProcessor(do_normalize=False, **ONE_TO_ONE),
        "bytes": hf.ViTImageProcessor(
            **{**OFTEN_SCALED, "image_mean": [99.0] * 3, "image_std": [50.0] * 3}, do_rescale=False
        ),
        "to 2": hf.ViTImageProcessor(rescale_factor=2 / 255, **OFTEN_SCALED),
    }[name]
    written("vit", tmp_path)
    processor.save_pretrained(tmp_path)
    model = load_backbone(tmp_path)
    small = torch.rand(1, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    picture = (255 * torch.nn.functional.interpolate(small, (57, 70), mode="bilinear"))[0].byte()
    theirs = processor(picture, return_tensors="pt")["pixel_values"]
    ours = model.view(picture[None], torch.tensor([picture.shape[1:]]))
    assert model.config.facts["init"]["notes"] == []
    # it rounds to bytes after it has resized: half a level, over the smallest std
    smallest = min(0.26, float(model.view.std.min()))
    assert (ours - theirs).abs().max() <= 1.5 / 255 / smallest


def test_an_image_processor_that_makes_other_images_is_said(tmp_path):
    """That of OWLv2 pads an image to a square, which no view does."""
    written("vit", tmp_path)
    hf.Owlv2ImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    notes = load_backbone(tmp_path).config.facts["init"]["notes"]
    assert any("Owlv2ImageProcessor" in note for note in notes)


def test_an_image_processor_that_makes_no_image_alone_is_said(tmp_path):
    """That of VitMatte wants a trimap, that of LayoutLMv3 a program: the weights need neither."""
    written("vit", tmp_path)
    hf.VitMatteImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    notes = load_backbone(tmp_path).config.facts["init"]["notes"]
    assert any("VitMatteImageProcessor" in note for note in notes)


def test_a_model_of_other_channels_than_rgb_is_refused(tmp_path):
    randomised(hf.ViTModel(hf.ViTConfig(**VIT, num_channels=1))).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"num_channels = 1, .*name other weights"):
        load_backbone(tmp_path)


def test_an_image_processor_of_blue_green_red_is_refused(tmp_path):
    """That of MobileViT."""
    written("vit", tmp_path)
    hf.MobileViTImageProcessor(size={"shortest_edge": 36}).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="blue, green, red"):
        load_backbone(tmp_path)


# open_clip

CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"layers": 2, "width": 64, "head_width": 32, **SIDES},
    "text_cfg": {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1},
}
TOWERS = {
    "vit": CLIP["vision_cfg"],
    "resnet": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8},
    "of timm": {"image_size": 32, "timm_model_name": "test_vit", "timm_pool": "token",
                "timm_proj": "linear", "timm_model_pretrained": True},
}  # fmt: skip


def clip_of(tower, folder, **preprocessing):
    """A folder of open_clip, and its model."""
    stated = {**CLIP, "vision_cfg": {**TOWERS[tower], "timm_model_pretrained": False}}
    network = randomised(open_clip.CLIP(**stated))
    tensors = {key: t.contiguous() for key, t in network.state_dict().items()}
    save_file(tensors, folder / "open_clip_model.safetensors")
    config = {"model_cfg": {**CLIP, "vision_cfg": TOWERS[tower]}, "preprocess_cfg": preprocessing}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return network


@pytest.mark.promise(10)
@pytest.mark.parametrize("tower", TOWERS)
def test_an_image_tower_of_open_clip_gives_its_features(tmp_path, tower):
    network = clip_of(tower, tmp_path)
    model = load_backbone(tmp_path)
    assert difference(model, network.visual, 32) <= 1e-5
    init = init_of(tmp_path)
    assert init["loaded"] == len(network.visual.state_dict())
    assert {*init["unexpected"]} == {k for k in network.state_dict() if not k.startswith("visual.")}
    assert (model.view.crop_px, model.view.interpolation) == (32, "bicubic")
    assert model.view.mean.tolist() == pytest.approx(open_clip.OPENAI_DATASET_MEAN)


def test_a_view_of_open_clip_is_its_own_and_an_export_the_same_network(tmp_path):
    stated = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "resize_mode": "squash"}
    network = clip_of("vit", tmp_path, **stated, interpolation="bilinear")
    model = load_backbone(tmp_path)
    expected = EvalView(32, 32, stated["mean"], stated["std"], squash=True)
    assert model.view.config() == expected.config()
    export_backbone(model, tmp_path / "out", ["safetensors"])
    assert difference(load_backbone(tmp_path / "out"), network.visual, 32) <= 1e-5
    # a position table for images of another size
    init = init_of(f"{tmp_path}@64")
    assert init["resized"] == ["positional_embedding"]


def test_a_checkpoint_of_open_clips_training_is_read_by_the_name_of_its_model(tmp_path):
    network = open_clip.create_model("ViT-S-32-alt")
    state = {f"module.{key}": tensor for key, tensor in network.state_dict().items()}
    path = saved({"epoch": 3, "name": "x", "state_dict": state}, tmp_path)
    model = load_backbone(f"open_clip/ViT-S-32-alt@{path}")
    assert difference(model, network.visual.eval(), 224) <= 1e-5
    with pytest.raises(WeightsError, match="did you mean 'ViT-S-32-alt'"):
        load_backbone(f"open_clip/ViT-S-32-al@{path}")


@pytest.mark.parametrize(
    ("name", "tag"),
    [("ViT-B-16-SigLIP", "webli"), ("MobileCLIP-S1", "datacompdr"), ("ViT-L-14", "openai"),
     ("ViT-L-14-CLIPA", "datacomp1b"), ("PE-Core-T-16-384", "meta")],
)  # fmt: skip
def test_images_of_a_model_that_is_named_are_those_of_open_clips_weights_of_it(name, tag):
    view, notes = open_clip_view(backbone_settings(f"open_clip/{name}"), {}).make("x", None)
    stated = open_clip.get_pretrained_cfg(name, tag)
    keys = ("mean", "std", "interpolation", "resize_mode")
    side = open_clip.get_model_config(name)["vision_cfg"]["image_size"]
    theirs = PreprocessCfg(size=side, **{key: stated[key] for key in keys})
    small = torch.rand(1, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    picture = (255 * torch.nn.functional.interpolate(small, (480, 640), mode="bilinear"))[0].byte()
    expected = image_transform_v2(theirs, is_train=False)(to_pil_image(picture))
    ours = view(picture[None], torch.tensor([picture.shape[1:]]))[0]
    assert (ours - expected).abs().max() <= 1.5 / 255 / min(stated["std"])
    assert any(f"open_clip's weights {tag}" in note for note in notes)
    # what the weights do not show is said: of one release other images, and another activation
    assert any("not as for laion2b_s32b_b82k" in note for note in notes) == (name == "ViT-L-14")
    assert any(f"open_clip/{name}-quickgelu@" in note for note in notes) == (name == "ViT-L-14")


def test_a_tower_that_would_be_downloaded_is_refused(tmp_path):
    clip_of("vit", tmp_path)
    config = {"embed_dim": 16, "vision_cfg": {"timm_model_name": "hf-hub:someone/else"}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    with pytest.raises(WeightsError, match=r"timm_model_name = 'hf-hub:someone/else'"):
        load_backbone(tmp_path)


def test_a_backbone_of_a_recipe_has_the_activation_of_timms_config(tmp_path):
    import timm

    arguments = {"depths": [1, 1, 2, 1], "dims": [8, 16, 24, 32]}
    network = randomised(
        timm.create_model("convnext_tiny", num_classes=0, act_layer="relu", **arguments)
    )
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": "convnext_tiny", "model_args": {**arguments, "act_layer": "relu"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    component = backbone_settings("timm/convnext_tiny", arguments)
    model = load_backbone(tmp_path, component=component, crop_px=64)
    assert difference(model, network, 64) <= 1e-5
