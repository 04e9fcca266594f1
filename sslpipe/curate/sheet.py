"""Draw pairs of samples side by side, the most doubtful first: what a person should look at."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sslpipe.curate.duplicates import Doubt
from sslpipe.curate.scan import Samples

CELL_PX, GAP_PX, LINE_PX, MARGIN_PX = 128, 10, 15, 20
BACKGROUND, INK, REFUSED = (250, 250, 248), (34, 34, 34), (176, 0, 32)
COLUMNS = 4  # pairs in a row
MOST_PAIRS = 120


def doubt_sheet(samples: Samples, doubt: Doubt, most: int = MOST_PAIRS) -> Image.Image | None:
    """Draw the doubtful pairs, those that were refused with red words.

    Args:
        samples: As scanned; their thumbnails are drawn.
        doubt: Of `duplicates.find_duplicates`.
        most: Pairs drawn.

    Returns:
        An RGB image; None where no pair is doubtful.
    """
    pairs, scores, verdicts = (column[:most] for column in doubt)
    if not len(pairs):
        return None
    font = ImageFont.load_default(size=11)
    step_x, step_y = 2 * CELL_PX + 2 + GAP_PX, CELL_PX + 2 * LINE_PX + GAP_PX
    columns = min(COLUMNS, len(pairs))
    rows = -(-len(pairs) // columns)
    size = columns * step_x - GAP_PX + 2 * MARGIN_PX, rows * step_y - GAP_PX + 2 * MARGIN_PX
    sheet = Image.new("RGB", size, BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    for place, pair in enumerate(pairs.tolist()):
        left = MARGIN_PX + place % columns * step_x
        top = MARGIN_PX + place // columns * step_y
        for side, thumb in enumerate(samples.thumbs.read(pair)):
            size = _fitted(*samples.sizes[pair[side]].tolist())
            sheet.paste(Image.fromarray(thumb).resize(size), (left + side * (CELL_PX + 2), top))
        accepted = bool(verdicts[place])
        words = f"{'one picture' if accepted else 'refused'}, score {scores[place]:.4f}"
        colour = INK if accepted else REFUSED
        pen.text((left, top + CELL_PX + 1), words, fill=colour, font=font)
        names = ", ".join(f"{samples.splits[samples.split[k]]}:{samples.ids[k]}" for k in pair)
        pen.text((left, top + CELL_PX + LINE_PX), names, fill=INK, font=font)
    return sheet


def _fitted(height: int, width: int) -> tuple[int, int]:
    """Width and height of a picture in a cell."""
    scale = CELL_PX / max(height, width)
    return tuple(int(v) for v in np.maximum(1, np.rint([width * scale, height * scale])))  # type: ignore[return-value]
