"""Backward passes written by hand, which torch cannot differentiate again."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from sslpipe.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


def first_order(backward: Callable[P, T]) -> Callable[P, T]:
    """Refuse second derivatives, of a backward that is no linear function of its gradient.

    torch's `once_differentiable` is silent where that gradient is a constant, as at the end of a
    loss: a gradient penalty or a Hessian would lack this part.

    Raises:
        UserError: The gradient is to be differentiated (create_graph=True).
    """

    @wraps(backward)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_grad_enabled():
            raise UserError(
                "create_graph = True: losses and BatchNorms of sslpipe have first derivatives "
                "only; leave it out, or write the loss in plain torch"
            )
        return backward(*args, **kwargs)

    return call
