"""The views on a GPU as Triton kernels: crop (and rotation), colours, blur; formulas of pixels.py.

One program makes BLOCK neighbouring pixels of one view. What is done to a view stands in tables
with a row a view, so all pixels of a program take the same branch. Between the kernels, views are
planar float32, (n, 3, side, side), in one workspace; the last kernel of each view writes the result
pixel by pixel, normalised, in the result's dtype.
"""

# Triton reads these functions' source and gives their arguments types of its own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from sslpipe.augment.pixels import BLEND, SHIFT_HUE

_BLEND = tl.constexpr(BLEND)
_SHIFT_HUE = tl.constexpr(SHIFT_HUE)


@triton.jit
def _pixels(side, BLOCK: tl.constexpr):
    """Give the places y side + x of this program's pixels, y, x, and which are inside the view."""
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return pixel, pixel // side, pixel % side, pixel < side * side


@triton.jit
def _plane(row, side):
    """Give where a view begins in the workspace."""
    return row.to(tl.int64) * 3 * side * side


@triton.jit
def _load(view, pixel, inside, side):
    red = tl.load(view + pixel, mask=inside, other=0.0)
    green = tl.load(view + side * side + pixel, mask=inside, other=0.0)
    blue = tl.load(view + 2 * side * side + pixel, mask=inside, other=0.0)
    return red, green, blue


@triton.jit
def _store(view, pixel, inside, side, red, green, blue):
    tl.store(view + pixel, red, mask=inside)
    tl.store(view + side * side + pixel, green, mask=inside)
    tl.store(view + 2 * side * side + pixel, blue, mask=inside)


@triton.jit
def _gray(red, green, blue):
    return red * 0.2989 + green * 0.587 + blue * 0.114  # pixels.GRAY_WEIGHTS


@triton.jit
def _unit(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _ramp(sixths, centre):
    return _unit(tl.abs(sixths - centre) - 1.0)


@triton.jit
def _shift_hue(red, green, blue, cycles):
    """Shift the hue h of HSV, in sixths of a cycle; value and chroma stay: pixels.shift_hue_."""
    value = tl.maximum(tl.maximum(red, green), blue)
    least = tl.minimum(tl.minimum(red, green), blue)
    chroma = value - least
    second = tl.where(value == green, blue - red + 2.0 * chroma, red - green + 4.0 * chroma)
    sixths = tl.where(value == red, green - blue, second)
    sixths = sixths / tl.maximum(chroma, 1e-30) + 6.0 * cycles
    sixths = sixths - 6.0 * tl.floor(sixths * (1 / 6))
    red = least + chroma * _ramp(sixths, 3.0)
    green = value - chroma * _ramp(sixths, 2.0)
    blue = value - chroma * _ramp(sixths, 4.0)
    return red, green, blue


@triton.jit
def _colour_steps(red, green, blue, kinds, terms, mean, first, last):
    """Do the steps first..last - 1: clamp(f x + g gray + m mean gray), or a hue shift.

    kinds: (STEPS,) int32 of this view; terms: (STEPS, 3) float32: f, g, m, or the shift in cycles.
    """
    for step in range(first, last):
        kind = tl.load(kinds + step)
        factor = tl.load(terms + 3 * step)
        if kind == _BLEND:
            target = _gray(red, green, blue) * tl.load(terms + 3 * step + 1)
            target += mean * tl.load(terms + 3 * step + 2)
            red = _unit(red * factor + target)
            green = _unit(green * factor + target)
            blue = _unit(blue * factor + target)
        if kind == _SHIFT_HUE:
            red, green, blue = _shift_hue(red, green, blue, factor)
    return red, green, blue


@triton.jit
def _sum_gray(red, green, blue, inside, kinds, terms, contrast, sums, row, STEPS: tl.constexpr):
    """Store this program's part of the sum of the gray that the view's contrast step will see."""
    before = tl.load(contrast + row)
    red, green, blue = _colour_steps(
        red, green, blue, kinds + row * STEPS, terms + row * STEPS * 3, 0.0, 0, before
    )
    gray = tl.where(inside, _gray(red, green, blue), 0.0)
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), tl.sum(gray, axis=0))


@triton.jit
def _write(
    red, green, blue, out, row, pixel, inside, side, threshold, mean, std,
    SOLARIZE: tl.constexpr,
):  # fmt: skip
    """Solarize at or above the threshold (of most views: infinite), normalise, write (y, x, c)."""
    if SOLARIZE:
        limit = tl.load(threshold + row)
        red = tl.where(red >= limit, 1.0 - red, red)
        green = tl.where(green >= limit, 1.0 - green, green)
        blue = tl.where(blue >= limit, 1.0 - blue, blue)
    start = out + _plane(row, side) + 3 * pixel
    tl.store(start, (red - tl.load(mean)) / tl.load(std), mask=inside)
    tl.store(start + 1, (green - tl.load(mean + 1)) / tl.load(std + 1), mask=inside)
    tl.store(start + 2, (blue - tl.load(mean + 2)) / tl.load(std + 2), mask=inside)


@triton.jit
def _taps(place, length, side):
    """Return each output pixel's triangle: its centre, reach, first and last input pixel.

    As resample.crop_taps: as wide as two input pixels, or two output pixels on a shrunk line.
    """
    scale = length.to(tl.float32) / side
    support = tl.maximum(scale, 1.0)
    centre = scale * (place.to(tl.float32) + 0.5)
    first = tl.maximum(tl.floor(centre - support + 0.5), 0.0)
    last = tl.minimum(tl.floor(centre + support - 0.5), length.to(tl.float32) - 1.0)
    return centre, support, first, last


@triton.jit
def _tap(tap, centre, support, first, last):
    """Give one tap's input pixel and weight, not normalised; taps too many weigh nothing."""
    position = first + tap
    weight = tl.maximum(1.0 - tl.abs(position + 0.5 - centre) / support, 0.0)
    weight = tl.where(position <= last, weight, 0.0)
    return tl.minimum(position, last).to(tl.int32), weight


@triton.jit
def crop_kernel(
    images, stride_n, stride_c, stride_y, stride_x, boxes, kinds, terms, contrast, views, sums,
    side, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Resample boxes of uint8 images to views in [0, 1], mirrored where asked; sum their gray.

    boxes: (n, 6) int32: image, top, left, height, width, mirrored.
    """
    row = tl.program_id(0)
    pixel, y, x, inside = _pixels(side, BLOCK)
    box = boxes + 6 * row
    top = tl.load(box + 1)
    left = tl.load(box + 2)
    height = tl.load(box + 3)
    width = tl.load(box + 4)
    x = tl.where(tl.load(box + 5) != 0, side - 1 - x, x)
    centre_y, support_y, first_y, last_y = _taps(y, height, side)
    centre_x, support_x, first_x, last_x = _taps(x, width, side)
    image = images + tl.load(box).to(tl.int64) * stride_n

    # sum_y w_y sum_x w_x pixel / (sum w_y sum w_x), every triangle's taps in turn
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    sum_y = tl.zeros([BLOCK], tl.float32)
    sum_x = tl.zeros([BLOCK], tl.float32)
    taps_y = tl.maximum((2 * height + side - 1) // side, 2) + 1  # resample.num_crop_taps
    taps_x = tl.maximum((2 * width + side - 1) // side, 2) + 1
    for tap_x in range(0, taps_x):
        sum_x += _tap(tap_x, centre_x, support_x, first_x, last_x)[1]
    for tap_y in range(0, taps_y):
        line, weight_y = _tap(tap_y, centre_y, support_y, first_y, last_y)
        sum_y += weight_y
        start = image + (top + line).to(tl.int64) * stride_y
        for tap_x in range(0, taps_x):
            column, weight_x = _tap(tap_x, centre_x, support_x, first_x, last_x)
            weight = weight_y * weight_x
            place = start + (left + column) * stride_x
            red += weight * tl.load(place, mask=inside, other=0).to(tl.float32)
            green += weight * tl.load(place + stride_c, mask=inside, other=0).to(tl.float32)
            blue += weight * tl.load(place + 2 * stride_c, mask=inside, other=0).to(tl.float32)
    weight = tl.where(inside, sum_y * sum_x * 255.0, 1.0)
    red = red / weight
    green = green / weight
    blue = blue / weight
    _store(views + _plane(row, side), pixel, inside, side, red, green, blue)
    _sum_gray(red, green, blue, inside, kinds, terms, contrast, sums, row, STEPS)


@triton.jit
def _corner(view, y, x, weight, inside, side, red, green, blue):
    """Add one of the four pixels around a point, black outside of the view."""
    there = inside & (x >= 0) & (x < side) & (y >= 0) & (y < side)
    place = (y * side + x).to(tl.int32)
    of_red, of_green, of_blue = _load(view, place, there, side)
    return red + weight * of_red, green + weight * of_green, blue + weight * of_blue


@triton.jit
def rotate_kernel(
    views, sines, cosines, kinds, terms, contrast, rotated, sums, side,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate each view about its centre, bilinear, black outside: pixels.rotate; sum its gray."""
    row = tl.program_id(0)
    pixel, y, x, inside = _pixels(side, BLOCK)
    sine = tl.load(sines + row)
    cosine = tl.load(cosines + row)
    middle = (side - 1) * 0.5
    from_x = cosine * (x - middle) - sine * (y - middle) + middle
    from_y = sine * (x - middle) + cosine * (y - middle) + middle
    left = tl.floor(from_x)
    top = tl.floor(from_y)
    part_x = from_x - left
    part_y = from_y - top
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    view = views + _plane(row, side)
    for corner in range(0, 4):
        down = corner // 2
        right = corner % 2
        weight_y = tl.where(down == 1, part_y, 1.0 - part_y)
        weight = weight_y * tl.where(right == 1, part_x, 1.0 - part_x)
        red, green, blue = _corner(
            view, top + down, left + right, weight, inside, side, red, green, blue
        )
    _store(rotated + _plane(row, side), pixel, inside, side, red, green, blue)
    _sum_gray(red, green, blue, inside, kinds, terms, contrast, sums, row, STEPS)


@triton.jit
def colour_kernel(
    views, kinds, terms, sums, blurred, out, threshold, mean, std, side,
    STEPS: tl.constexpr, PARTS: tl.constexpr, SOLARIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do every view's colour steps in its own order; write what is not blurred, else change it."""
    row = tl.program_id(0)
    state = tl.load(blurred + row)
    if state != 2:
        pixel, _, _, inside = _pixels(side, BLOCK)
        part = tl.arange(0, PARTS)  # a power of two
        parts = tl.load(
            sums + row * tl.num_programs(1) + part, mask=part < tl.num_programs(1), other=0.0
        )
        mean_gray = tl.sum(parts, axis=0) / (side * side)
        view = views + _plane(row, side)
        red, green, blue = _load(view, pixel, inside, side)
        red, green, blue = _colour_steps(
            red, green, blue, kinds + row * STEPS, terms + row * STEPS * 3, mean_gray, 0, STEPS
        )
        if state == 1:
            _store(view, pixel, inside, side, red, green, blue)
        else:
            _write(red, green, blue, out, row, pixel, inside, side, threshold, mean, std, SOLARIZE)


@triton.jit
def _reflected(place, side):
    """Give the pixel of a line that stands for one beyond its ends."""
    return side - 1 - tl.abs(side - 1 - tl.abs(place))


@triton.jit
def _blurred(
    view, start, at, stride, inside, side, sigma, reach, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blur along each pixel's line: it is the one `at`, of those at start + 0, 1, ... stride."""
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    weights = 0.0
    kept = tl.minimum(reach * 1.0, tl.floor(5.9 * sigma) + 1.0).to(tl.int32)
    for offset in range(-kept, kept + 1):
        weight = tl.exp(-0.5 * (offset / sigma) * (offset / sigma))
        weights += weight
        place = start + _reflected(at + offset, side) * stride
        of_red, of_green, of_blue = _load(view, place, inside, side)
        red += weight * of_red
        green += weight * of_green
        blue += weight * of_blue
    return red / weights, green / weights, blue / weights


@triton.jit
def blur_down_kernel(views, blurred, sigmas, down, side, reach, BLOCK: tl.constexpr):
    """Blur the lines down of those views that are blurred, into (n, 3, side, side)."""
    row = tl.program_id(0)
    if tl.load(blurred + row) != 0:
        pixel, y, x, inside = _pixels(side, BLOCK)
        sigma = tl.load(sigmas + row)
        view = views + _plane(row, side)
        red, green, blue = _blurred(view, x, y, side, inside, side, sigma, reach, BLOCK)
        _store(down + _plane(row, side), pixel, inside, side, red, green, blue)


@triton.jit
def blur_across_kernel(
    down, blurred, sigmas, out, threshold, mean, std, side, reach,
    SOLARIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blur the lines across of what `blur_down_kernel` has made, and write those views."""
    row = tl.program_id(0)
    if tl.load(blurred + row) != 0:
        pixel, y, x, inside = _pixels(side, BLOCK)
        sigma = tl.load(sigmas + row)
        view = down + _plane(row, side)
        red, green, blue = _blurred(view, y * side, x, 1, inside, side, sigma, reach, BLOCK)
        _write(red, green, blue, out, row, pixel, inside, side, threshold, mean, std, SOLARIZE)
