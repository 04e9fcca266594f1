"""Pixels decide: what must not depend on how pairs are compared."""

import io
from contextlib import closing

import numpy as np
import pytest
from PIL import Image

from sslpipe.curate.duplicates import Limits
from sslpipe.curate.scan import scan_pictures
from sslpipe.curate.thumbnails import ThumbFile
from sslpipe.curate.verify import compare


def pictures(count, seed=0):
    """Smooth random pictures with some detail, (48, 56, 3) uint8."""
    rng = np.random.default_rng(seed)
    waves = rng.normal(size=(count, 6, 7, 3)).repeat(8, 1).repeat(8, 2)
    return list(np.clip(128 + 50 * waves + 4 * rng.normal(size=waves.shape), 0, 255).astype("u1"))


@pytest.fixture
def samples():
    """Pictures, three of them grey; then as many mirrored, cut to 90 %, and with a border."""
    made = pictures(6)
    made[:3] = [picture[:, :, :1].repeat(3, 2) for picture in made[:3]]
    made += [picture[:, ::-1] for picture in made[:6]]
    made += [picture[2:45, 3:53] for picture in made[:6]]
    made += [np.pad(picture, ((3, 3), (3, 3), (0, 0)), "linear_ramp") for picture in made[:6]]
    found = scan_pictures(made)
    with closing(found.pictures.thumbs):
        yield found


def every_pair(count):
    return np.stack(np.triu_indices(count, 1), 1)


def test_a_pair_has_one_verdict_whatever_is_compared_beside_it(samples):
    first, _ = samples.pictures.of(np.arange(len(samples)))
    pairs = first[every_pair(len(samples))]
    together = compare(pairs, samples.pictures)
    assert (together.best() > 0.9).sum() >= 18  # not all refused
    for row in range(0, len(pairs), 7):
        alone = compare(pairs[row : row + 1], samples.pictures)
        for one, many in zip(alone, together, strict=True):
            assert one[0] == many[row]


def test_copies_are_told_by_what_was_done_to_them(samples):
    first, _ = samples.pictures.of(np.arange(len(samples)))
    own = np.arange(6)
    for kind, mirrored, cropped in ((1, True, False), (2, False, True), (3, False, True)):
        found = compare(first[np.stack([own, own + 6 * kind], 1)], samples.pictures)
        assert (found.best() > 0.98).all()
        assert (found.mirrored == mirrored).all()
        assert (found.cropped == cropped).all()


def test_what_jpeg_left_does_not_end_the_registration_of_a_crop():
    made = [np.asarray(Image.fromarray(shown).resize((224, 192))) for shown in pictures(6, seed=1)]
    for shown in made[:6]:
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(shown[12:185, 9:211])).save(file, "JPEG", quality=10)
        made.append(np.asarray(Image.open(file).convert("RGB")))
    samples = scan_pictures(made)
    with closing(samples.pictures.thumbs):
        first, _ = samples.pictures.of(np.arange(12))
        found = compare(first.reshape(2, 6).T, samples.pictures)
    # up to a rest of twice the limit a pair tells how far other pictures are
    assert (found.best() > 1 - 2 * Limits().rest).all()
    assert found.cropped.all()


def test_pictures_without_colours_have_the_score_that_colours_would_give(samples, monkeypatch):
    first, _ = samples.pictures.of(np.arange(len(samples)))
    grey = np.arange(len(samples)).reshape(4, 6)[:, :3].ravel()
    pairs = first[grey[every_pair(len(grey))]]
    assert not samples.pictures.thumbs.coloured(pairs).any()
    found = compare(pairs, samples.pictures)
    monkeypatch.setattr(ThumbFile, "coloured", lambda self, rows: np.ones(np.shape(rows), bool))
    by_colours = compare(pairs, samples.pictures)
    # three equal channels are one, but for rounding and a 1 that steadies the sharpness
    np.testing.assert_allclose(found.best(), by_colours.best(), atol=2e-4)
    assert (found.best() > 0.9).sum() >= 9


@pytest.mark.parametrize("cut", [np.s_[:, 24:], np.s_[:, :216]])
def test_a_crop_along_a_shore_that_is_the_same_everywhere_is_found(cut):
    rng = np.random.default_rng(0)
    for _ in range(6):
        shore = np.repeat(rng.uniform(40, 220, 12), 20)[:, None].repeat(240, 1)
        reeds = rng.uniform(-1, 1, (12, 12)).repeat(20, 0).repeat(20, 1)
        grey = np.uint8(np.clip(shore + 6 * reeds, 0, 255))[..., None].repeat(3, 2)
        samples = scan_pictures([grey, np.ascontiguousarray(grey[cut])])
        with closing(samples.pictures.thumbs):
            first, _ = samples.pictures.of(np.arange(2))
            assert compare(first[None], samples.pictures).best()[0] > 0.99


def test_no_pairs_are_no_verdicts(samples):
    assert compare(np.zeros((0, 2), np.int64), samples.pictures).best().shape == (0,)
