"""Warms the fork servers, whose processes inherit what torch keeps of shapes that it has seen.

Half of a tiny training's time is its estimate of memory, as long as torch has not seen the shapes.
"""

from sslpipe.models.backbones import small_resnet
from sslpipe.models.simclr import SimCLR
from sslpipe.recipe.pretrain import Projector
from sslpipe.run.memory import saved_bytes

pretraining = SimCLR(small_resnet((8, 16, 16)), Projector(hidden_dim=16, out_dim=8))
for network, crop_px in ((pretraining, 16), (small_resnet((8, 16)), 16)):
    for images in (2, 4):
        saved_bytes(network, 2 * images, crop_px, "fp32")
