"""A whitening inside an export: at every instant of its writing the export is whole."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from sslpipe.errors import UserError
from sslpipe.evaluation.embed import Embeddings, load_embeddings, save_embeddings
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.load import load_backbone
from sslpipe.export.whiten import whiten_export
from sslpipe.export.write import export_model
from tests.helpers.exports import trained, tree

pytestmark = pytest.mark.usefixtures("proved_here")
IMAGES = torch.randint(0, 256, (3, 3, 40, 40), generator=torch.Generator().manual_seed(0)).byte()


class Killed(BaseException): ...


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """An export, and a features file of its own."""
    folder = tmp_path_factory.mktemp("whiten")
    export_model(trained(), folder / "out", ["safetensors"])
    config = load_backbone(folder / "out").config
    rows = torch.randn(50, config.num_features, generator=torch.Generator().manual_seed(0))
    facts = {"backbone_sha256": config.weights_sha256, "view": config.view}
    ids = torch.arange(50)
    save_embeddings(folder / "train.safetensors", Embeddings(rows, ids % 2, ids), facts)
    return folder / "out", folder / "train.safetensors"


def encoded(folder: Path) -> torch.Tensor:
    return load_backbone(folder).encode(IMAGES)


@pytest.mark.parametrize(("power", "used"), [(0.0, 0.0), (0.5, 0.5), (None, 0.25)])
def test_a_power_also_one_chosen_on_train_flattens_what_the_export_encodes(
    export, tmp_path, power, used
):
    (out, train), said = export, []
    shutil.copytree(out, tmp_path / "out")
    whiten_export(tmp_path / "out", train, power=power, say=said.append)
    if power is None:  # of two classes
        chosen = "power 0.25, as labels cannot choose: 2 classes have two images or more"
        assert said.pop(0).startswith(chosen)
    assert said[0].startswith("50 rows are few for 128 features")
    expected = fit_whitening(load_embeddings(train)[0], power=used).apply(encoded(out))
    torch.testing.assert_close(encoded(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("whitened_before", [False, True])
def test_a_whitening_that_is_killed_leaves_the_export_before_or_the_one_after(
    export, tmp_path, monkeypatch, whitened_before
):
    out, train = export
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(out, before)
    if whitened_before:
        whiten_export(before, train, power=0.5)
    shutil.copytree(before, after)
    whiten_export(after, train, dims=5)
    known = [encoded(before), encoded(after)]
    assert known[1].shape == (3, 5)

    # killed before each file that is put in its place, and then begun again
    real, seen = os.replace, []
    for last in range(10):
        folder, left = tmp_path / f"killed-{last}", last
        shutil.copytree(before, folder)

        def replace(source, target):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(Path, "replace", replace)
        try:
            whiten_export(folder, train, dims=5)
        except Killed:
            pass
        else:
            break
        finally:
            monkeypatch.undo()
        actual = encoded(folder)
        seen.append([torch.equal(actual, features) for features in known])
        whiten_export(folder, train, dims=5)
        assert tree(folder) == tree(after)
        assert all((folder / p).read_bytes() == (after / p).read_bytes() for p in tree(after))
    assert seen == [[True, False]] * 3 + [[False, True]] * 2


def test_a_folder_of_another_program_is_not_whitened(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "test_resnet"}')
    with pytest.raises(UserError, match="write an export of it with `sslpipe export` first"):
        whiten_export(tmp_path, tmp_path / "train.safetensors")
    assert (tmp_path / "config.json").read_text() == '{"architecture": "test_resnet"}'
