"""What losses, heads and miners share: checked and remembered arguments."""

import inspect
from typing import Any, ClassVar, Self

from torch import nn

from sslpipe.errors import did_you_mean


class Configured(nn.Module):
    """Remember the constructor's arguments: for the repr, and to refuse those that do not exist.

    `settings` maps each argument's name to its value, defaults included.

    Raises:
        TypeError: an argument is unknown; the message names the nearest one.
    """

    __signature__: ClassVar[inspect.Signature]
    settings: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take the signature from the constructor."""
        super().__init_subclass__(**kwargs)
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]  # without self
        cls.__signature__ = inspect.Signature(own)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check and remember the arguments."""
        parameters = cls.__signature__.parameters
        for name in kwargs:
            if name not in parameters:
                raise TypeError(
                    f"{cls.__name__} takes no {name}{did_you_mean(name, parameters)}; "
                    f"it takes: {', '.join(parameters) or 'nothing'}"
                )
        self = super().__new__(cls)
        bound = cls.__signature__.bind_partial(*args, **kwargs)  # a copy is made without any
        bound.apply_defaults()
        object.__setattr__(self, "settings", dict(bound.arguments))
        return self

    def __init__(self) -> None:
        super().__init__()  # nn.Module's own signature takes anything

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{type(self).__name__}({arguments})"
