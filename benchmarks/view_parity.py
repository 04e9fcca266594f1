"""How far our views are from torchvision's: a table and a picture.

    python -m benchmarks.view_parity [--out docs]

Each op at the same parameters, ours in a batch, torchvision.transforms.v2 on float tensors one
image at a time: the largest and the mean difference, in units of [0, 1], over 12 images of white
noise (the worst case) of 32, 96 and 224 px. Each parameter, 20,000 draws of ours against
20,000 of torchvision's: the p-value of a Kolmogorov-Smirnov test (chi-squared for the order).
The picture does the same ops to a photograph. Writes view_parity.md and view_parity.png.
"""

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torchvision.transforms.v2 as transforms
import torchvision.transforms.v2.functional as reference
from PIL import Image, ImageDraw, ImageFont
from scipy import stats
from sklearn.datasets import load_sample_image
from torch import Tensor
from torchvision.transforms import InterpolationMode

from benchmarks.common import markdown_table
from sslpipe.augment import pixels
from sslpipe.augment.params import Draws, ViewSpec, draws
from sslpipe.augment.pixels import HUE
from sslpipe.augment.resample import (
    TOGETHER_PX,
    crop_apart,
    crop_together,
    gaussian_blur,
    plan_crops,
)
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.pipeline import Batch

COUNT, NUM_DRAWS = 12, 20_000
SIDES = (32, 96, 224)
LARGEST_SIGMA = 2.0
ADJUST = (
    reference.adjust_brightness,
    reference.adjust_contrast,
    reference.adjust_saturation,
    reference.adjust_hue,
)


class Comparison(NamedTuple):
    """ours: images, draws -> images; theirs: the same for one image and its row of draws."""

    name: str
    ours: Callable[[Tensor, Draws], Tensor]
    theirs: Callable[[Tensor, Draws], Tensor]
    tolerance: Callable[[int], str] = lambda side: "2e-6"


def crop(images: Tensor, params: Draws) -> Tensor:
    side, source = images.shape[-1], torch.arange(len(images))
    apart = torch.full_like(params.flip, side > TOGETHER_PX)
    crops = plan_crops(source, params.boxes, params.flip, apart, side)
    return (crop_apart if apart[0] else crop_together)(images * 255, crops)


def crop_reference(image: Tensor, draw: Draws) -> Tensor:
    side = [image.shape[-1]] * 2
    view = reference.resized_crop(image, *draw.boxes[0].tolist(), size=side, antialias=True)
    return reference.horizontal_flip(view) if draw.flip else view


def jitter(images: Tensor, params: Draws, order: Tensor) -> Tensor:
    """Rows of one call share the step of hue, as in FusedViews."""
    done = images.clone()
    for step in range(order.shape[1]):
        rows = (order[:, step] == HUE).nonzero()[:, 0]
        if len(rows):
            done[rows] = _jitter_rows(images[rows], params.factors[rows], order[rows], step)
    without = (order != HUE).all(1).nonzero()[:, 0]
    if len(without):
        factors = params.factors[without]
        done[without] = _jitter_rows(images[without], factors, order[without], None)
    return done


def _jitter_rows(images: Tensor, factors: Tensor, order: Tensor, hue_step: int | None) -> Tensor:
    all_rows = torch.ones(len(images), dtype=torch.bool)
    blends = pixels.make_blends(order, factors, all_rows)
    needs = [(True, True, True)] * blends.factor.shape[1]
    hue_shift = factors[:, HUE]
    return pixels.change_colours(images.clone(), blends, hue_shift, hue_step, needs, pixels.EAGER)


def jitter_reference(image: Tensor, draw: Draws, order: list[int]) -> Tensor:
    for op in order:
        image = ADJUST[op](image, float(draw.factors[0, op]))
    return image


def single(name: str, column: int) -> Comparison:
    return Comparison(
        name,
        lambda x, d: jitter(x, d, torch.full((len(x), 1), column)),
        lambda x, d: jitter_reference(x, d, [column]),
    )


def blur_px(side: int) -> int:
    return ViewSpec(crop_px=side).blur_kernel_px


def blur_reference(image: Tensor, draw: Draws) -> Tensor:
    kernel = blur_px(image.shape[-1])
    return reference.gaussian_blur(image, [kernel] * 2, [float(draw.sigma)] * 2)


COMPARISONS = [
    Comparison("crop + flip", crop, crop_reference, lambda side: "2e-6" if side <= 96 else "2e-5"),
    Comparison(
        "rotation",
        lambda x, d: pixels.rotate(x, d.angle_deg),
        lambda x, d: reference.rotate(
            x, float(d.angle_deg), interpolation=InterpolationMode.BILINEAR
        ),
        lambda side: f"{4e-7 * side:.0e}",
    ),
    single("brightness", 0),
    single("contrast", 1),
    single("saturation", 2),
    single("hue", 3),
    Comparison(
        "jitter in its own order",
        lambda x, d: jitter(x, d, d.order),
        lambda x, d: jitter_reference(x, d, d.order[0].tolist()),
        lambda side: "1e-5",
    ),
    Comparison(
        "grayscale",
        lambda x, d: pixels.to_gray(x).expand(-1, 3, -1, -1),
        lambda x, d: reference.rgb_to_grayscale(x, 3),
    ),
    Comparison(
        "blur, exact",
        lambda x, d: gaussian_blur(x, d.sigma, blur_px(x.shape[-1]), LARGEST_SIGMA),
        blur_reference,
    ),
    Comparison(
        "blur, bf16",
        lambda x, d: gaussian_blur(x, d.sigma, blur_px(x.shape[-1]), LARGEST_SIGMA, bfloat16=True),
        blur_reference,
        lambda side: "7.8e-3 (2/255)",
    ),
    Comparison(
        "solarize",
        lambda x, d: pixels.solarize(x, torch.full((len(x),), 0.5)),
        lambda x, d: reference.solarize(x, 0.5),
        lambda side: "0",
    ),
]


def params_for(images: Tensor) -> Draws:
    count, side = len(images), images.shape[-1]
    spec = ViewSpec(crop_px=side, rotation_deg=20)
    return draws(0, 0, np.arange(count), np.full((count, 2), side), (spec,))


def one_by_one(op: Comparison, images: Tensor, params: Draws) -> Tensor:
    rows = range(len(images))
    return torch.stack([op.theirs(images[r], params.rows(slice(r, r + 1))) for r in rows])


def op_table() -> str:
    rows = []
    for op in COMPARISONS:
        for side in SIDES:
            generator = torch.Generator().manual_seed(side)
            images = torch.randint(0, 256, (COUNT, 3, side, side), generator=generator) / 255
            params = params_for(images)
            error = (op.ours(images, params) - one_by_one(op, images, params)).abs()
            if not float(error.max()) <= float(op.tolerance(side).split()[0]):
                raise SystemExit(f"{op.name} at {side} px is off by {error.max():.1e}")
            found = (f"{error.max():.1e}", f"{error.mean():.1e}")
            rows.append([op.name, side, *found, op.tolerance(side)])
    return markdown_table(["op", "px", "largest", "mean", "allowed"], rows)


def distribution_table() -> str:
    torch.manual_seed(0)
    spec = ViewSpec(rotation_deg=20)
    size = (375, 500)
    ours = draws(3, 1, np.arange(NUM_DRAWS), np.tile(size, (NUM_DRAWS, 1)), (spec,))
    image = torch.empty(3, *size, device="meta")
    sampler = transforms.RandomResizedCrop(224)
    boxes = [sampler.make_params([image]) for _ in range(NUM_DRAWS)]
    theirs = np.array([[b["height"], b["width"], b["top"], b["left"]] for b in boxes], float)
    mine = ours.boxes[:, [2, 3, 0, 1]].double().numpy()
    pairs = {
        "crop area": (mine[:, 0] * mine[:, 1], theirs[:, 0] * theirs[:, 1]),
        "crop aspect": (mine[:, 1] / mine[:, 0], theirs[:, 1] / theirs[:, 0]),
        "crop top": (mine[:, 2], theirs[:, 2]),
        "crop left": (mine[:, 3], theirs[:, 3]),
    }
    color = transforms.ColorJitter(*spec.jitter_strengths)
    params = [color.make_params([]) for _ in range(NUM_DRAWS)]
    for column, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        values = np.array([p[f"{name}_factor"] for p in params])
        pairs[name] = (ours.factors[:, column].numpy(), values)
    blur, rotation = transforms.GaussianBlur(23, spec.blur_sigma), transforms.RandomRotation(20)
    sigma = np.array([blur.make_params([])["sigma"][0] for _ in range(NUM_DRAWS)])
    angle = np.array([rotation.make_params([])["angle"] for _ in range(NUM_DRAWS)])
    pairs |= {"blur sigma": (ours.sigma.numpy(), sigma)}
    pairs |= {"rotation": (ours.angle_deg.numpy(), angle)}
    found = {name: stats.ks_2samp(*pair).pvalue for name, pair in pairs.items()}
    places = 24 ** torch.arange(4)
    codes = [(ours.order * places).sum(1)]
    codes.append((torch.stack([p["fn_idx"] for p in params]) * places).sum(1))
    counts = torch.stack([c.unique(return_counts=True)[1] for c in codes])
    found["op order (24)"] = stats.chi2_contingency(counts.numpy()).pvalue
    flips = [int(ours.flip.sum()), int((torch.rand(NUM_DRAWS) < 0.5).sum())]
    table = [flips, [NUM_DRAWS - f for f in flips]]
    found["flip"] = stats.chi2_contingency(table).pvalue
    return markdown_table(["parameter", "p"], [[name, f"{p:.2f}"] for name, p in found.items()])


def picture() -> Image.Image:
    """Columns: ops, then the whole of `byol`; rows: ours, torchvision's, the difference x 1,000."""
    side, gap, margin = 128, 6, 96
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    small = reference.resize(photo, [side, side], antialias=True)[None].float() / 255
    params = params_for(small.expand(COUNT, -1, -1, -1)).rows(slice(8, 9))
    params.sigma[:], params.flip[:] = 1.8, True
    columns = [("image", small[0], None)]
    columns += [
        (op.name.split(" in ")[0], op.ours(small, params)[0], op.theirs(small[0], params))
        for op in COMPARISONS
    ]
    columns += whole_pipeline(photo, side)
    font = ImageFont.load_default(size=13)
    width = margin + len(columns) * (side + gap)
    page = Image.new("RGB", (width, 30 + 3 * (side + gap)), "white")
    pen = ImageDraw.Draw(page)
    for row, title in enumerate(("ours", "torchvision", "difference\nx 1,000")):
        pen.text((8, 30 + row * (side + gap) + side // 2 - 10), title, (30, 30, 30), font)
    for column, (name, ours, theirs) in enumerate(columns):
        x = margin + column * (side + gap)
        pen.text((x, 8), name, (30, 30, 30), font)
        page.paste(as_image(ours), (x, 30))
        if theirs is not None:
            page.paste(as_image(theirs), (x, 30 + side + gap))
            difference = (ours - theirs).abs() * 1000
            page.paste(as_image(difference), (x, 30 + 2 * (side + gap)))
    return page


def whole_pipeline(photo: Tensor, side: int) -> list[tuple[str, Tensor, Tensor]]:
    """Both views of `byol`, without normalisation, ours and torchvision's."""
    augment = FusedViews("byol", side, normalize=False)
    ids = torch.arange(1)
    batch = Batch(photo[None], torch.tensor([list(photo.shape[1:])]), ids, ids, ids, 1)
    params = draws(0, 1, ids, batch.sizes, augment.specs)
    both = []
    for number, view in enumerate(augment(batch, params)):
        row, spec = params.rows(slice(number, number + 1)), augment.specs[number]
        box = row.boxes[0].tolist()
        theirs = photo.float() / 255
        theirs = reference.resized_crop(theirs, *box, size=[side, side], antialias=True)
        theirs = reference.horizontal_flip(theirs) if row.flip else theirs
        if row.jitter:
            theirs = jitter_reference(theirs, row, row.order[0].tolist())
        theirs = reference.rgb_to_grayscale(theirs, 3) if row.grayscale else theirs
        theirs = blur_reference(theirs, row) if row.blur else theirs
        if row.solarize:
            theirs = reference.solarize(theirs, spec.solarize_threshold)
        both.append((f"byol, view {number + 1}", view, theirs))
    return both


def as_image(pixels: Tensor) -> Image.Image:
    levels = pixels.mul(255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchvision"))
    text = f"""# Our views against torchvision's

Written by `python -m benchmarks.view_parity` ({versions}).

![Ours, torchvision's, and the difference](view_parity.png)

Largest and mean difference at the same parameters, pixels in [0, 1], 12 images of white
noise. `allowed` is what `tests/augment` allow.

{op_table()}

Are the parameters distributed as torchvision's? {NUM_DRAWS:,} draws of each,
Kolmogorov-Smirnov (order, flip: chi-squared). A p under 1e-4 fails the tests.

{distribution_table()}
"""
    out.mkdir(parents=True, exist_ok=True)
    (out / "view_parity.md").write_text(text)
    picture().quantize(256).save(out / "view_parity.png", optimize=True)
    print(text)


if __name__ == "__main__":
    main()
