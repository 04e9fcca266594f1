"""Parameter groups of optimizers, described and judged."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from sslpipe.recipe.sections import Optim

ABSURD = 100  # times the usual rate


def parameter_groups(
    model: nn.Module,
    optim: Optim,
    lr_scale: Callable[[str], float] = lambda name: 1.0,
    *,
    pretrained: str | None = None,
) -> list[dict[str, Any]]:
    """Make an optimizer's groups of the model's trainable parameters.

    "decay": parameters of two or more dimensions. "no_decay": others (biases, norms, scalars),
    without weight decay and LARS adaptation, unless optim.decay_one_dim.

    Args:
        model: its parameters that require a gradient.
        optim: the recipe's section.
        lr_scale: a parameter's name -> what its learning rate is multiplied by; each value makes
            groups of its own.
        pretrained: how the names of parameters begin that start from weights; they have groups of
            their own. None: there are none.
    """
    # groups: by learning rate, then with and without decay, then pretrained ones
    members: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            decayed = p.ndim > 1 or optim.decay_one_dim
            started = pretrained is not None and name.startswith(pretrained)
            members.setdefault((lr_scale(name), decayed, started), []).append(p)
    groups: list[dict[str, Any]] = []
    for (scale, decayed, started), parameters in sorted(
        members.items(), key=lambda item: (-item[0][0], not item[0][1], item[0][2])
    ):
        group = {
            "name": ("decay" if decayed else "no_decay")
            + (" pretrained" if started else "")
            + (f" x{scale:.3g}" if scale != 1 else ""),
            "params": parameters,
            "weight_decay": optim.weight_decay if decayed else 0.0,
            "lr_scale": scale,
        }
        if started:
            group["pretrained"] = True
        groups.append(group | optim.group_settings(decayed))
    return groups


def describe_groups(groups: Iterable[dict[str, Any]], model: nn.Module) -> str:
    """Describe each group in one line: its sizes and settings, its tensors of each kind."""
    kinds = {
        parameter: f"{type(module).__name__}.{name}"
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    lines = []
    for group in groups:
        numbers = sum(p.numel() for p in group["params"])
        adapted = {True: ", adapted layer by layer", False: ", not adapted", None: ""}
        counts = Counter(kinds[p] for p in group["params"])
        lines.append(
            f"{group['name']}: {len(group['params'])} tensors, {numbers:,} numbers,"
            f" weight decay {group['weight_decay']:g}{adapted[group.get('adapt')]}"
            f" ({', '.join(f'{count} {kind}' for kind, count in counts.items())})"
        )
    return "\n".join(lines)


def rate_warning(optim: Optim, batch_size: int) -> str | None:
    """Return in one sentence that a rate is 0, or far above what is usual; None where it is not."""
    known = optim.usual_rate(batch_size)
    if optim.peak_lr == 0:
        usual_rate = f"; {known[0]:.2g} is usual ({known[1]})" if known else ""
        return (
            f"optim.peak_lr = 0: no step changes a weight, so that nothing is learned{usual_rate}"
        )
    if known is None:
        return None
    usual, source = known
    times = optim.peak_lr / usual
    if times <= ABSURD:
        return None
    return (
        f"optim.peak_lr = {optim.peak_lr:g} is {times:,.0f} times {usual:.2g}, which is usual of "
        f"{optim.kind} at a batch of {batch_size} ({source}): is a digit too "
        "many? Such steps end in NaN, or teach nothing"
    )
