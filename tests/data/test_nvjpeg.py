"""data.decoder = "nvjpeg", tried with torchcodec's decoder for the CPU; on a GPU where one is."""

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from sslpipe.data.decode import decode, is_plain_jpeg
from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.data.index import load_index
from sslpipe.data.nvjpeg import DeviceDecoder, jpeg_decoder
from sslpipe.errors import RecipeError
from sslpipe.recipe.pretrain import Data
from tests.data.test_decode import encoded, photo
from tests.helpers.batches import take
from tests.helpers.dataset import picture, write_dataset


def why_not():
    """Why torchcodec cannot be used here; "" where it can: its libraries fit one torch each."""
    try:
        DeviceDecoder(torch.device("cpu"))
    except ImportError:
        return "torchcodec is not installed"
    except OSError:
        return "torchcodec was built for another torch"
    return ""


needs_torchcodec = pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
LEVELS = 8  # of 255, that decoders may differ by in a pixel where colours are sharp
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@needs_torchcodec
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("canvas_px", [64, 40])
def test_it_gives_what_the_own_decoder_gives(device, mode, canvas_px):
    raws = [encoded(photo(seed=n).convert(mode), "JPEG", quality=95) for n in range(3)]
    assert all(map(is_plain_jpeg, raws))
    decoded = DeviceDecoder(torch.device(device))(raws)
    for raw, image in zip(raws, decoded, strict=True):
        # nvJPEG repeats the colours of every other pixel, which libjpeg-turbo interpolates
        plain = simplejpeg.decode_jpeg(raw, fastupsample=True) if device == "cuda" else None
        expected, got = decode(raw, canvas_px, plain), decode(raw, canvas_px, image)
        assert got.shape == expected.shape
        assert got.transpose(1, 2, 0).flags.c_contiguous
        difference = np.abs(got.astype(np.int16) - expected)
        assert difference.max() <= LEVELS
        assert difference.mean() <= 1


def test_only_whole_upright_jpegs_of_an_allowed_size_are_decoded_elsewhere():
    whole = encoded(photo(), "JPEG")
    at = whole.index(b"\xff\xc0")  # the frame header: height and width follow
    bomb = whole[: at + 5] + b"\xff\xff\xff\xff" + whole[at + 9 :]
    exif = Image.Exif()
    exif[0x0112] = 6
    exif_oriented = encoded(photo(), "JPEG", exif=exif.tobytes())
    cmyk = encoded(photo().convert("CMYK"), "JPEG")
    others = [encoded(photo(), "PNG"), exif_oriented, cmyk, whole[:20], whole[:-20], b""]
    assert is_plain_jpeg(whole)
    assert not any(map(is_plain_jpeg, [*others, bomb]))


@pytest.mark.parametrize("cache", ["none", "device"])
def test_the_loaders_decode_together_what_it_can_and_the_rest_themselves(tmp_path, cache):
    jpegs = {n: encoded(photo(16, 16, seed=n), "JPEG") for n in range(32) if n % 4}
    calls = []

    def decoder(raws):
        calls.append(len(raws))
        return [np.full((16, 16, 3), len(raw) % 256, np.uint8) for raw in raws]

    batch = first_batch(tmp_path, jpegs, cache, decoder, batch_size=8)
    for image, sample in zip(batch.images, batch.ids.tolist(), strict=True):
        expected = torch.from_numpy(picture(sample)).permute(2, 0, 1)
        if sample % 4:
            expected = torch.full((3, 16, 16), len(jpegs[sample]) % 256, dtype=torch.uint8)
        assert torch.equal(image, expected)
    assert max(calls) > 1


@pytest.mark.parametrize("cache", ["none", "device"])
def test_what_it_refuses_is_decoded_as_ever_and_one_cut_short_is_never_given_to_it(tmp_path, cache):
    jpegs = {number: encoded(photo(16, 16, seed=number), "JPEG") for number in range(32)}
    jpegs[5] = jpegs[5][:-20]
    bad = []
    asked = set()

    def decoder(raws):
        asked.update(map(bytes, raws))
        raise RuntimeError("nvJPEG: status 5")

    batch = first_batch(tmp_path, jpegs, cache, decoder, batch_size=32, bad=bad)
    assert [record.id for record in bad] == [5]
    assert asked == set(jpegs.values()) - {jpegs[5]}
    for image, sample in zip(batch.images, batch.source_ids.tolist(), strict=True):
        assert torch.equal(image, torch.from_numpy(decode(jpegs[sample], 16)))


def first_batch(folder, jpegs, cache, decoder, **settings):
    index = load_index(write_dataset(folder, (16, 16), broken=jpegs))
    settings |= {"run": {"num_workers": 0, "cache": cache}}
    sizes = {"num_streams": 2, "window": 4, "canvas_px": 16}
    return take(index, 1, jpeg=decoder, seed=0, **sizes, **settings)[0]


GREY = ImageType(channels=("nir",), dtype="uint16", low=(0,), high=(1,))


@pytest.mark.parametrize(
    ("device", "image_type", "words"),
    [
        ("cpu", RGB8, r"data.decoder = 'nvjpeg' needs a CUDA device.*on cpu"),
        ("cuda", GREY, "the images have 1 channels of uint16"),
    ],
)
def test_where_it_cannot_serve_the_run_ends_before_it_begins(device, image_type, words):
    assert jpeg_decoder(Data(), torch.device(device), image_type) is None
    with pytest.raises(RecipeError, match=words):
        jpeg_decoder(Data(decoder="nvjpeg"), torch.device(device), image_type)
