"""What every process with fake GPUs imports, once: tests.helpers.fakecuda forks them behind it."""

import sys

sys.modules["triton"] = None  # type: ignore[assignment]  # see runtime.allow_triton

import torch._dynamo  # noqa: E402, F401
import torchvision  # noqa: E402, F401

from tests.helpers import fakecuda, finetunes  # noqa: E402, F401
