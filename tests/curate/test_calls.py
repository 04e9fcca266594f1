"""What `sslpipe curate` does as calls of Python, on what a notebook has."""

import numpy as np
import pytest
import torch
from PIL import Image

import sslpipe
from sslpipe.curate.duplicate_files import COLUMN
from sslpipe.data.index import load_index
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.feature_files import save_embeddings
from tests.curate.test_duplicates import smooth
from tests.helpers.dataset import png, write_dataset
from tests.helpers.exports import trained

COUNT = 40


@pytest.fixture
def kinds():
    """Features of four kinds of samples, row 33 like no other, and the kind of each row."""
    rng = np.random.default_rng(0)
    numbers = np.arange(COUNT) % 4
    features = 5 * np.eye(8)[numbers] + 0.5 * rng.normal(size=(COUNT, 8))
    features[33] = -np.ones(8)
    return features, numbers


def forms(features, folder):
    """The same features in each form that people have, and a data set's."""
    rows = torch.from_numpy(features)
    ids = torch.arange(len(rows))
    embedded = Embeddings(rows.float(), torch.full_like(ids, -1), ids)
    np.save(folder / "rows.npy", features)
    np.savez(folder / "rows.npz", features=features)
    save_embeddings(folder / "rows.safetensors", embedded, {})
    files = [folder / "rows.npy", str(folder / "rows.npz"), folder / "rows.safetensors"]
    return [features, features.astype(np.float32), rows, features.tolist(), embedded, *files]


def test_each_form_of_features_gets_the_same_answers(kinds, tmp_path):
    features, numbers = kinds
    for form in forms(features, tmp_path):
        assert [one.id for one in sslpipe.find_outliers(form, k=5)] == [33]
        clusters = sslpipe.cluster(form, 5)
        assert sorted(clusters.sizes.tolist()) == [1, 9, 10, 10, 10]
        assert all(len({*numbers[clusters.members(k)]}) == 1 for k in range(5))
        chosen = [one.id for one in sslpipe.select_to_label(form, 5)]
        assert len({*numbers[[each for each in chosen if each != 33]]}) == 4
        # of what has a label, no cluster is chosen from
        known = np.flatnonzero(numbers < 3).tolist()
        (one,) = sslpipe.select_to_label(form, 1, labelled=known)
        assert numbers[one.id] == 3


def test_with_the_data_set_images_are_looked_at(kinds, tmp_path):
    features, _ = kinds
    black = png(np.zeros((16, 16, 3), np.uint8))
    data = write_dataset(tmp_path / "data", (20, 20), labelled=False, broken={7: black})
    index = load_index(data)
    ids = torch.arange(COUNT)
    rows = Embeddings(torch.from_numpy(features).float(), torch.full_like(ids, -1), ids)
    facts = {"data_sha256": index.sha256, "split": "train", "view": {"resize_px": 16}}
    save_embeddings(tmp_path / "train.safetensors", rows, facts)
    file = tmp_path / "train.safetensors"
    listed = sslpipe.find_outliers(file, data, k=5)
    assert [(one.id, one.reason) for one in listed] == [(33, "no neighbour"), (7, "constant")]
    with pytest.raises(UserError, match="in memory"):
        sslpipe.find_outliers(rows, data)


def test_duplicates_of_images_in_memory_and_of_their_data_set_are_the_same(tmp_path):
    pictures = [smooth(k) for k in range(12)]
    pictures[9] = pictures[2][:, ::-1]  # mirrored
    Image.fromarray(pictures[4]).save(tmp_path / "4.jpg", quality=60)
    files = []
    for number, picture in enumerate([*pictures, pictures[2]]):
        files.append(tmp_path / f"{number:02d}.png")
        Image.fromarray(picture).save(files[-1])
    files.append(tmp_path / "4.jpg")
    (tmp_path / "dead.png").write_bytes(b"no image")
    given = [*files[:6], tmp_path / "dead.png", *files[6:], tmp_path / "gone.png"]
    with pytest.warns(UserWarning, match="images") as warned:
        found = sslpipe.find_duplicates(given)
    assert [each.message.args[0].split("'")[1] for each in warned] == ["images[6]", "images[15]"]
    with pytest.raises(UserError, match="int"):
        sslpipe.find_duplicates([files[0], 7])
    places = {str(path): place for place, path in enumerate(given)}
    groups = {}
    for row in found.table():
        groups.setdefault(row["group"], set()).add(row["key"])
        assert row["id"] == places[row["key"]]
    expected = [{2, 9, 12}, {4, 13}]
    assert [*groups.values()] == [{str(files[k]) for k in each} for each in expected]
    arrays = sslpipe.find_duplicates([*pictures[:9], Image.fromarray(pictures[9]), pictures[10]])
    assert [row["id"] for row in arrays.table()] == [2, 9]
    sslpipe.build_dataset(tmp_path / "data", [str(file) for file in files])
    of_data = sslpipe.find_duplicates(tmp_path / "data", column=True)
    assert len(of_data.table()) == 5
    assert load_index(tmp_path / "data").split("train").has_values(COLUMN)
    with pytest.raises(UserError, match="column"):
        sslpipe.find_duplicates(pictures, column=True)


def test_the_terminal_writes_tables_of_vectors_alone(call, kinds, tmp_path):
    features, _ = kinds
    names = np.array([f"shop/{place} ä.jpg" for place in range(COUNT)])
    np.savez(tmp_path / "rows.npz", features=features, ids=names)
    out = tmp_path / "out"
    words = [tmp_path / "rows.npz", "--out", out]
    call("curate", "outliers", *words, "--k", 5)
    assert "shop/33 ä.jpg" in (out / "outliers.csv").read_text(encoding="utf-8")
    call("curate", "clusters", *words, "--count", 5)
    assert all(name in (out / "clusters.csv").read_text(encoding="utf-8") for name in names)
    call("curate", "select", *words, "--count", 4)
    lines = (out / "chosen.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 5
    # what a person fills in counts
    filled = tmp_path / "filled.csv"
    filled.write_text("\n".join([lines[0], *(f"{line}owl" for line in lines[1:])]))
    call(
        "curate", "select", *words[:1], "--out", tmp_path / "next", "--count", 4, "--labels", filled
    )
    ids = [
        {line.split(",")[2] for line in file.read_text().splitlines()[1:]}
        for file in (filled, tmp_path / "next" / "chosen.csv")
    ]
    assert not ids[0] & ids[1]
    select = ("select", *words[:1], "--out", tmp_path / "new", "--count", 4, "--images")
    _, errors = call("curate", *select, status=2)
    assert "--data" in errors


def test_what_embed_returns_knows_its_split_as_its_file_does(tmp_path):
    data = write_dataset(tmp_path / "data", (12, 12), classes=4)
    write_dataset(tmp_path / "other", (12, 12), classes=3)
    backbone = trained()
    rows = sslpipe.embed(backbone, data, "train", device="cpu")
    file = tmp_path / "rows.safetensors"
    written = sslpipe.embed(backbone, data, "train", out=file, device="cpu")
    assert written.facts == {**rows.facts, "left_out": []}
    expected = sslpipe.find_outliers(file, data, k=2, z=0.5)
    assert expected
    for each in (rows, written):
        assert sslpipe.find_outliers(each, data, k=2, z=0.5) == expected
        with pytest.raises(UserError, match=r"features was not embedded from .*other"):
            sslpipe.find_outliers(each, tmp_path / "other")
    # some of its rows, or features of a program, do not
    for unknown in (rows.rows(torch.arange(5)), rows.features):
        with pytest.raises(UserError, match=r"do not say of which split.*sslpipe\.embed"):
            sslpipe.find_outliers(unknown, data)
