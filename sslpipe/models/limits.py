"""What no memory holds is refused while it is built, before its first number is written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from sslpipe.errors import RecipeError, UserError, WeightsError, shown
from sslpipe.portable import memory_is_short, total_memory_bytes

MOST_MODULES = 10_000  # the deepest networks that timm has are of a third
_NO_MEMORY = ("allocate memory", "storage size", "overflow", "too large", "out of memory")
MOST_IMAGE_GB = 4.0  # SSLPIPE_IMAGE_GB: memory that one image may take in a network of others
_BYTES_PER_PX = 256  # the first layers' maps: 64 float32 channels


class TooLarge(RecipeError):
    """A network asks for more memory or modules than allowed."""


def most_image_bytes() -> int:
    """Return the memory that one image may take. Raises: UserError for a garbled setting."""
    text = os.environ.get("SSLPIPE_IMAGE_GB", str(MOST_IMAGE_GB))
    try:
        return int(float(text) * 2**30)
    except (ValueError, OverflowError):
        raise UserError(f"SSLPIPE_IMAGE_GB = {shown(text)} is no number of GiB") from None


def check_side(what: str, side_px: int) -> None:
    """Check the side of the images that a source asks for, before anything of it is built.

    Raises:
        WeightsError: One image would take more than `most_image_bytes` in the first layers.
    """
    most_px = int((most_image_bytes() / _BYTES_PER_PX) ** 0.5)
    if not 1 <= side_px <= most_px:
        raise WeightsError(
            f"{what} asks for images of {shown(side_px)} px, not of 1 to {most_px:,} px; where "
            "memory suffices, SSLPIPE_IMAGE_GB=N allows N GiB for an image"
        )


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Refuse networks whose parameters and buffers exceed this machine's memory and swap.

    Also those of more than MOST_MODULES modules, which take minutes to build.

    Args:
        what: The recipe's section, for messages: "[backbone]".

    Raises:
        TooLarge: Of the modules that are built inside, as soon as they are too many or too
            large.
    """
    total, held, modules = total_memory_bytes(), 0, 0

    def count_bytes(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal held
        held += 0 if tensor is None else tensor.numel() * tensor.element_size()
        if held > total:
            raise TooLarge(
                f"{what} asks for weights of more than {held / 2**30:,.0f} GiB, and this machine "
                f"has {total / 2**30:,.1f} GiB of memory and swap; use smaller sizes"
            )

    def count_modules(module: nn.Module, name: str, child: Any) -> None:
        nonlocal modules
        modules += 1
        if modules > MOST_MODULES:
            raise TooLarge(
                f"{what} asks for more than {MOST_MODULES:,} modules; use fewer layers or blocks"
            )

    handles = [
        hooks.register_module_parameter_registration_hook(count_bytes),
        hooks.register_module_buffer_registration_hook(count_bytes),
        hooks.register_module_module_registration_hook(count_modules),
    ]
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError, RecipeError) as error:
        if not isinstance(error, MemoryError) and not any(
            w in str(error).lower() for w in _NO_MEMORY
        ):
            raise
        if memory_is_short(error):  # other things take it
            raise
        raise TooLarge(
            f"{what} asks for more memory than this machine can give ({total / 2**30:,.1f} GiB "
            "with swap); use smaller sizes"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
