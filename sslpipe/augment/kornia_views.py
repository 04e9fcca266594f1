"""The same views by kornia's ops, one image at a time: the reference for FusedViews."""

import torch
from torch import Tensor

from sslpipe.augment.base import BaseViews
from sslpipe.augment.op import Draws
from sslpipe.augment.ops import ops_for
from sslpipe.data.pipeline import Batch


class KorniaViews(BaseViews):
    """Make FusedViews' views by kornia's ops: same arguments, draws and rows.

    Slow: it loops over rows. ops.py says where kornia differs.
    """

    @torch.no_grad()
    def forward(
        self, batch: Batch, draws: Draws | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the views of a batch of B images: (2B, 3, S, S) of dtype, channels_last."""
        import kornia

        draws = self.plan_of(batch, draws).draws
        images, shown = batch.images, batch.view_images(len(self.specs)).tolist()
        with torch.autocast(images.device.type, enabled=False):
            views = torch.cat(
                [
                    self._make_view(images[shown[row]], draws.rows(slice(row, row + 1)))
                    for row in range(len(draws.ids))
                ]
            )
            if self.extra is not None:
                views = self.extra(views, draws)
            views = kornia.enhance.normalize(views, self.mean, self.std)
        out: Tensor = views.to(dtype).contiguous(memory_format=torch.channels_last)
        return out

    def _make_view(self, image: Tensor, draw: Draws) -> Tensor:
        """(3, H, W) uint8 and one row of draws -> (1, 3, S, S) in [0, 1]."""
        spec, view = self.specs[int(draw.views)], image[None].float() / 255
        for op in ops_for(self.specs):
            view = op.apply_one(view, draw, spec)
        return view
