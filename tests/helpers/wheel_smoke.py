"""Run by an environment that holds nothing but the wheel, outside the clone."""

import importlib.util
import sys

import torch

import sslpipe

assert "site-packages" in sslpipe.__file__, sslpipe.__file__
for name in ("tools", "tests", "pytest", "lightly"):  # of the clone, or not of the default install
    assert importlib.util.find_spec(name) is None, name

backbone = sslpipe.load_backbone(sys.argv[1])
images = torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16).remainder(256).to(torch.uint8)
expected = torch.load(f"{sys.argv[1]}.features.pt", weights_only=True)
torch.testing.assert_close(backbone.encode(images), expected, rtol=1e-5, atol=1e-6)
print(f"sslpipe from {sslpipe.__file__}: an export loads and gives the same features")
