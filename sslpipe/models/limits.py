"""Networks that are too large: of strangers, refused before memory is taken; else, one line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from sslpipe.errors import RecipeError, WeightsError, shown
from sslpipe.portable import gib, memory_is_short, total_memory_bytes

Network = TypeVar("Network", bound=nn.Module)
MOST_MODULES = 10_000  # the deepest networks that timm has are of a third
_NO_MEMORY = ("allocate memory", "storage size", "overflow", "too large", "out of memory")
MOST_SIDE_PX = 4096  # of an image: its first maps, of 64 channels, take 4 GiB


class TooLarge(RecipeError):
    """A network asks for more memory or modules than allowed."""


def check_side(what: str, side_px: int) -> None:
    """Check the side of the images that a source asks for, before anything of it is built.

    Raises:
        WeightsError: It is more than MOST_SIDE_PX.
    """
    if not 1 <= side_px <= MOST_SIDE_PX:
        raise WeightsError(
            f"{what} asks for images of {shown(side_px)} px, not of 1 to {MOST_SIDE_PX:,} px; name "
            "a smaller size"
        )


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Turn an allocation that fails into one line.

    Args:
        what: The recipe's section, for messages: "[backbone]".

    Raises:
        TooLarge: What is built inside needs more memory than this machine gives.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError, RecipeError) as error:
        is_size = any(words in str(error).lower() for words in _NO_MEMORY)
        if not isinstance(error, MemoryError) and not is_size:
            raise
        if memory_is_short(error):  # other things take it
            raise
        raise TooLarge(
            f"{what} asks for more memory than this machine can give "
            f"({gib(total_memory_bytes())} with swap); use smaller sizes"
        ) from error


@contextmanager
def small_enough(what: str) -> Iterator[None]:
    """Stop a network that is being built at its MOST_MODULES-th module, or where memory ends.

    Its weights are counted as they are declared, before they are drawn: memory that is only
    reserved takes none.

    Args:
        what: The recipe's section, for messages: "[backbone]".

    Raises:
        TooLarge: It has more modules, which would take minutes and all memory, or its weights
            alone are larger than this machine's memory.
    """
    most_bytes = total_memory_bytes()
    modules = 0
    weights_bytes = 0

    def count_module(module: nn.Module, name: str, child: Any) -> None:
        nonlocal modules
        modules += 1
        if modules > MOST_MODULES:
            raise TooLarge(
                f"{what} asks for more than {MOST_MODULES:,} modules; use fewer layers or blocks"
            )

    def count_weights(module: nn.Module, name: str, weights: nn.Parameter) -> None:
        nonlocal weights_bytes
        weights_bytes += 0 if weights.is_meta else weights.nbytes
        if weights_bytes > most_bytes:
            raise TooLarge(
                f"{what} asks for weights that are larger than this machine's memory "
                f"({gib(most_bytes)} with swap); use smaller sizes"
            )

    counting_modules = register_module_module_registration_hook(count_module)
    counting_weights = register_module_parameter_registration_hook(count_weights)
    try:
        yield
    finally:
        counting_modules.remove()
        counting_weights.remove()


def sketch(what: str, build: Callable[[], Network]) -> Network:
    """Build a network of a stranger's settings on the meta device: its sizes, and no numbers.

    Raises:
        TooLarge: Its sizes overflow, or it has more than MOST_MODULES modules.
    """
    with within_memory(what), small_enough(what), torch.device("meta"):
        return build()
