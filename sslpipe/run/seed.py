"""The seeds of torch's generators, which a step sets anew."""

import torch

from sslpipe.random import hash_integers


def seed_torch(device: torch.device, *words: int) -> None:
    """Seed the CPU's and a device's generator, for dropout and the like, by a hash of integers.

    torch.manual_seed seeds every kind of device there is, and notes who asked for it where it
    cannot yet: most of a millisecond.
    """
    seed = int(hash_integers(*words) >> 1)  # a positive int64
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
