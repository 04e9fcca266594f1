"""Measure what makes a picture useless whatever it shows: darkness, blur, a size of a few pixels.

Measures and limits are cleanvision's 0.3.7 where it has one (the package reads files through pandas
and brings matplotlib). Its score of blur rises with contrast and with the number of tones, so that
most blurred photographs and drawings pass it; `fineness` is a share of the contrast, and finds
those.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageStat

CANVAS_PX = 256  # longer side at which brightness is measured
SHARPNESS_PX = 64  # longer side at which edges are, as in cleanvision's utils/constants.py
FINE_PX = 4  # what blur takes first is finer than this
LEAST_CONTRAST = 0.02  # five of 256 levels, several times the noise of a JPEG of one colour
ROUNDING = 1 / 12  # variance of a level's rounding error: no detail
FEW_TONES = 0.18  # a histogram score up to this counts as none: cleanvision's color_threshold


class Check(NamedTuple):
    """A reason to doubt a picture: a measure below a limit, or above it."""

    reason: str
    limit: float
    above: bool
    says: str  # what the measure is

    def doubts(self, value: float) -> bool:
        """Say whether a value lies on the wrong side."""
        return value > self.limit if self.above else value < self.limit


def checks(tiny_px: float) -> tuple[Check, ...]:
    """List what a picture is doubted for, one of a shorter side below `tiny_px` among them.

    Source:
        cleanvision 0.3.7, issue_managers/image_property_issue_manager.py, get_default_params: dark
        0.32, light 0.05 from white, odd aspect ratio 0.35, blurry 0.29. `constant` and `no fine
        detail` are this project's.
    """
    return (
        Check("dark", 0.32, False, "99th percentile of brightness"),
        Check("bright", 0.95, True, "5th percentile of brightness"),
        Check("constant", LEAST_CONTRAST, False, "standard deviation of brightness"),
        Check("blurred", 0.29, False, "score of edges and tones"),
        Check("no fine detail", 0.025, False, "share of contrast finer than 4 px"),
        Check("tiny", tiny_px, False, "shorter side in px"),
        Check("odd aspect", 0.35, False, "shorter by longer side"),
    )


def measure(pixels: NDArray[np.uint8], height: int, width: int) -> dict[str, float]:
    """Measure one picture: reason of a check -> its measure.

    Args:
        pixels: (h, w, 3) uint8, RGB, at most CANVAS_PX on the longer side.
        height: Of the stored picture, in px.
        width: As height.
    """
    tones, image = brightness(pixels), Image.fromarray(pixels)
    darkest, brightest = np.percentile(tones, [5, 99])
    return {
        "dark": float(brightest),
        "bright": float(darkest),
        "constant": float(tones.std()),
        "blurred": sharpness(image),
        "no fine detail": fineness(image),
        "tiny": min(height, width),
        "odd aspect": min(height, width) / max(height, width),
    }


def brightness(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Compute how bright each pixel looks, 0 to 1. (h, w, 3) -> (h, w).

    Source:
        Finley 2006, "HSP color model"; cleanvision's calculate_brightness.
    """
    squares = np.square(pixels.astype(np.float64))
    bright: NDArray[np.float64] = np.sqrt(squares @ [0.241, 0.691, 0.068]) / 255
    return bright


def sharpness(image: Image.Image) -> float:
    """Score edges and tones, 0 to 1; few tones on a large plain ground are no blur.

    Source:
        cleanvision's BlurrinessProperty, with its normalizing_factor of 0.01.
    """
    ratio = max(image.size) / SHARPNESS_PX
    if ratio > 1:
        width, height = (max(int(side // ratio), 1) for side in image.size)
        image = image.resize((width, height))
    grey = image.convert("L")
    edges = ImageStat.Stat(grey.filter(ImageFilter.FIND_EDGES)).stddev[0]
    tones = 1 - np.exp(-0.01 * np.std(grey.histogram()))
    score = 1 - np.exp(-0.01 * edges) + (tones if tones > FEW_TONES else 0.0)
    return min(1.0, float(score))


def fineness(image: Image.Image) -> float:
    """Compute how much of a picture's contrast is lost where it is reduced FINE_PX times.

    Returns:
        The standard deviation of what it loses by that, as a share of its own, 0 to about 1; 1 of a
        picture that is nearly constant, which has nothing to lose.
    """
    grey = image.convert("L").convert("F")
    before = np.asarray(grey, np.float64)
    if before.std() < 255 * LEAST_CONTRAST:
        return 1.0
    width, height = (side / FINE_PX for side in grey.size)  # the last pixels may be narrower
    small = grey.reduce(FINE_PX)
    again = small.resize(grey.size, Image.Resampling.BICUBIC, box=(0, 0, width, height))
    lost = np.square(before - np.asarray(again)).mean() - ROUNDING
    return float(np.sqrt(max(lost, 0.0)) / before.std())
