"""Each sample once, the backbone untouched, files exact, the same rows from several processes."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import load_index
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.evaluation import embed_file, features
from sslpipe.evaluation.embed import Embeddings, EmbedOptions, embed
from sslpipe.evaluation.embed_file import embed_to_file
from sslpipe.evaluation.feature_files import load_embeddings, save_embeddings
from sslpipe.evaluation.features import pixel_features, random_backbone
from sslpipe.models.backbones import backbone_settings
from sslpipe.models.state import evaluating, module_sha256
from tests.helpers.dataset import picture, png, write_dataset
from tests.helpers.processes import run_processes

VIEW = {"crop_px": 16, "resize_px": 16, "mean": [0.5] * 3, "std": [0.25] * 3}


def make_backbone():
    backbone = random_backbone(
        backbone_settings("small_resnet", {"widths": [4, 8]}), crop_px=16, seed=1
    )
    torch.manual_seed(0)
    with torch.no_grad():  # running statistics that differ from a batch's own
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 2)
    return backbone


@pytest.fixture
def split(tmp_path):
    return load_index(write_dataset(tmp_path / "data", (5, 9, 7))).split("train")


def test_each_sample_has_one_row_of_the_backbones_features_in_id_order(split):
    backbone = make_backbone()
    rows = embed(backbone, EvalView(**VIEW), split, EmbedOptions(batch_size=4))
    assert rows.ids.tolist() == list(range(21))
    assert rows.labels.tolist() == [i % 4 for i in range(21)]
    pixels = np.stack([picture(i) for i in range(21)]).transpose(0, 3, 1, 2) / 255
    images = torch.from_numpy(((pixels - 0.5) / 0.25).astype(np.float32))
    with torch.no_grad():
        expected = backbone.eval()(images)
    torch.testing.assert_close(rows.features, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("px", "passes"), [(16, [21]), (176, [16, 5])])
def test_a_cpu_takes_as_many_images_at_once_as_its_caches_hold(split, px, passes):
    backbone, seen = make_backbone(), []
    backbone.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    rows = embed(backbone, EvalView(**VIEW | {"crop_px": px, "resize_px": px}), split)
    assert seen == passes
    assert rows.ids.tolist() == list(range(21))


class Learning(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images):
        self.seen += 1
        return images.flatten(1)


def test_the_backbone_is_the_same_before_and_after_and_modes_are_restored(split):
    backbone = make_backbone().train()
    frozen_part = backbone.network[1].eval()
    before = module_sha256(backbone)
    embed(backbone, EvalView(**VIEW), split)
    assert module_sha256(backbone) == before
    with pytest.raises(RuntimeError, match="stop"), evaluating(backbone):
        raise RuntimeError("stop")
    modes = [each.training for each in (backbone, backbone.network[0], frozen_part)]
    assert modes == [True, True, False]
    with pytest.raises(AssertionError, match="changed the backbone"):
        embed(Learning(), EvalView(**VIEW), split)


def test_a_bad_sample_is_reported_and_has_no_row_or_is_an_error(tmp_path):
    data = write_dataset(tmp_path, (6, 6), broken={7: b"no image"})
    split, bad = load_index(data).split("train"), []
    rows = embed(make_backbone(), EvalView(**VIEW), split, EmbedOptions(on_bad=bad.append))
    assert rows.ids.tolist() == [i for i in range(12) if i != 7]
    assert [(b.id, b.key) for b in bad] == [(7, "train000007")]
    with pytest.raises(DataError, match="train000007"):
        embed(make_backbone(), EvalView(**VIEW), split)


def bar_of(message):
    """A progress bar that appends how many samples are left, then each batch's."""

    def bar(left):
        message.append(left)
        return contextlib.nullcontext(message.append)

    return bar


def test_a_pass_that_was_killed_resumes_and_gives_the_same_bytes(split, tmp_path, monkeypatch):
    monkeypatch.setattr(embed_file, "PART_SAMPLES", 4)
    options = (make_backbone(), EvalView(**VIEW), split)
    embed_to_file(tmp_path / "whole.safetensors", *options, {"run": 1})
    out, message = tmp_path / "again.safetensors", []
    real, other = embed_file.embed_share, tmp_path / "other.safetensors"
    for file in (out, other):
        calls = iter((real, real, real))  # the fourth part is not embedded
        with monkeypatch.context() as patch:
            patch.setattr(embed_file, "embed_share", lambda *a, n=calls, **o: next(n)(*a, **o))
            with pytest.raises(StopIteration):
                embed_to_file(file, *options, {"run": 1})
        assert not file.exists()
    embed_to_file(out, *options, {"run": 1}, bar=bar_of(message))
    assert (message[0], sum(message[1:])) == (9, 9)  # three parts of four were there
    of_another = []
    embed_to_file(other, *options, {"run": 2}, bar=bar_of(of_another))
    assert of_another[0] == 21, "parts of another backbone are not resumed"
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"again.safetensors", "data", "other.safetensors", "whole.safetensors"}


def test_a_bad_sample_is_named_in_the_file_even_if_its_whole_part_is_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(embed_file, "PART_SAMPLES", 4)
    data = write_dataset(tmp_path / "data", (6, 6), broken=dict.fromkeys(range(4, 9), b"none"))
    out, bad = tmp_path / "rows.npz", []
    split = load_index(data).split("train")
    options = EmbedOptions(on_bad=bad.append)
    embed_to_file(out, make_backbone(), EvalView(**VIEW), split, {}, options)
    rows, facts = load_embeddings(out)
    assert rows.ids.tolist() == [0, 1, 2, 3, 9, 10, 11]
    assert [one["id"] for one in facts["left_out"]] == list(range(4, 9))
    assert facts["left_out"][0]["key"] == "train000004"
    assert len(bad) == 5


PARTS = (None, [2, 3, 17])  # all 21 rows; three, so that one process of four has none


def embed_in_rank(process: Rank, data: str, out: str):
    backbone, split = make_backbone(), load_index(data).split("train")
    view = EvalView(**VIEW)
    embed_file.PART_SAMPLES = 4
    options = EmbedOptions(process=process, batch_size=4)
    embed_to_file(Path(out), backbone, view, split, {"run": 1}, options)
    return [tuple(embed(backbone, view, split, options, ids=ids)) for ids in PARTS]


@pytest.mark.promise(6)
def test_every_process_gets_every_row_once(split, tmp_path):
    one, many = tmp_path / "one.safetensors", tmp_path / "many.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_file, "PART_SAMPLES", 4)
        expected = [tuple(rows) for rows in embed_in_rank(Rank(), split.folder, str(one))]
    for actual in run_processes(embed_in_rank, 4, split.folder, str(many)):
        for rows, alone in zip(actual, expected, strict=True):
            assert torch.equal(rows[1], alone[1])
            assert torch.equal(rows[2], alone[2])
            torch.testing.assert_close(rows[0], alone[0], rtol=1e-5, atol=1e-6)
    assert expected[1][2].tolist() == PARTS[1]
    assert many.read_bytes() == one.read_bytes()


def test_a_file_keeps_every_bit_and_the_facts(tmp_path):
    rows = Embeddings(
        torch.randn(3, 2), torch.tensor([2**62, -1, 0]), torch.tensor([5, 2**53 + 1, 7])
    )
    path = tmp_path / "deep" / "rows.safetensors"
    save_embeddings(path, rows, {"split": "test", "view": VIEW})
    again, facts = load_embeddings(path)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(rows, again, strict=True))
    assert facts == {"split": "test", "view": VIEW}
    assert [p.name for p in path.parent.iterdir()] == ["rows.safetensors"]


def test_a_file_that_holds_no_embeddings_is_one_clear_error(tmp_path):
    save_file({"vectors": torch.zeros(2, 2)}, tmp_path / "part")
    (tmp_path / "text").write_text("hello")
    rows = Embeddings(torch.ones(2, 3), torch.arange(2), torch.arange(2))
    save_embeddings(tmp_path / "nan", rows._replace(features=rows.features * torch.nan), {})
    messages = {"part": "holds no features", "text": "cannot read", "none": "cannot read"}
    messages["nan"] = "not finite, as are 2 of"
    for name, message in messages.items():
        with pytest.raises(DataError, match=message):
            load_embeddings(tmp_path / name)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("embeddings", "y"), "'embeddings', 'y';"),
        ((), "nothing;"),
        ([f"a{number:02}" for number in range(30)], "'a00', .*'a09' and 20 more;"),
    ],
)
def test_of_a_file_without_features_what_it_holds_is_said(tmp_path, names, said):
    arrays = {name: np.ones((2, 3), np.float32) for name in names}
    np.savez(tmp_path / "x.npz", **arrays)
    save_file({name: torch.ones(2, 3) for name in names}, tmp_path / "x.safetensors")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(DataError, match=f"{path} holds no features, but {said}") as refused:
            load_embeddings(path)
        assert "features=..." in str(refused.value)


def test_pixel_features_of_gray_images_keep_one_channel_and_all_cosines(tmp_path):
    def gray(number: int) -> bytes:
        pixels = picture(number)[:, :, :1].repeat(3, axis=2)
        return png(np.asarray(Image.fromarray(pixels)))

    broken = {i: gray(i) for i in range(6)}
    split = load_index(write_dataset(tmp_path, (6,), broken=broken)).split("train")
    one, two = pixel_features([split, split], view=EvalView(**VIEW))
    (small,) = pixel_features([split], view=EvalView(crop_px=64, resize_px=80))
    assert small.features.shape == (6, 32 * 32)  # of a large view
    assert one.features.shape == two.features.shape == (6, 256)
    np.testing.assert_allclose(
        one.features[3].numpy().reshape(16, 16), picture(3)[:, :, 0] / 255, atol=1e-6
    )


def test_sides_of_very_many_pixels_are_halved_which_a_sentence_says(split, monkeypatch):
    pixels = np.stack([picture(i) for i in range(21)]) / 255  # (21, 16, 16, 3)
    assert features.MOST_PIXELS == 2**26
    for numbers, side in ((pixels.size, 16), (pixels.size - 1, 8), (1, 8)):
        monkeypatch.setattr(features, "MOST_PIXELS", numbers)
        left_out: list[str] = []
        (rows,) = pixel_features([split], view=EvalView(**VIEW), left_out=left_out)
        means = pixels.reshape(21, side, 16 // side, side, 16 // side, 3).mean((2, 4))
        expected = means.transpose(0, 3, 1, 2).reshape(21, -1)
        np.testing.assert_allclose(rows.features.numpy(), expected, atol=1e-6)
        said = f"pixels at 16 px: of 21 images they are more than {numbers:,} numbers; measured at"
        assert left_out == ([] if side == 16 else [f"{said} 8 px"])


def test_a_random_backbone_is_named_by_its_seed_and_leaves_torchs_generator_alone():
    before = torch.random.get_rng_state()
    component = backbone_settings(kind="small_resnet")
    hashes = [module_sha256(random_backbone(component, 28, seed=seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert hashes[0] == hashes[1] != hashes[2]
