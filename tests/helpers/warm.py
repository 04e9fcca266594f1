"""Warms the fork server, whose processes inherit what torch keeps of shapes that it has seen.

Half of a tiny training's time is its estimate of memory, as long as torch has not seen the shapes.
"""

import os
from unittest.mock import patch

import torch

from sslpipe.models.backbones import small_resnet
from sslpipe.models.simclr import SimCLR
from sslpipe.planning.memory import saved_bytes
from sslpipe.recipe.pretrain import Projector

os.fsync = lambda descriptor: None  # nobody pulls the plug, and to wait for the disk takes time
# a process that has used CUDA, as fakes do where there is a GPU, has no forks that can
with patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1"):  # does not count as such a use
    without_gpu = not torch.cuda.is_available()

if without_gpu:
    pretraining = SimCLR(small_resnet((8, 16, 16)), Projector(hidden_dim=16, out_dim=8))
    for network in (pretraining, small_resnet((8, 16))):
        for images in (2, 4):
            saved_bytes(network, rows=2 * images, crop_px=16, precision="fp32")
