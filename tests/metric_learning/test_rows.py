"""Every loss and head on inputs that spoil digits, against loops in float64.

Most is slow. Tolerances: values to VALUE, gradients to GRADIENT of their size, from half precision,
too (everything is computed in float32 at least), but for the rounding of its gradients.
"""

import pytest
import torch
import torch.nn.functional as F

from sslpipe.metric_learning import HEADS, METRIC_LOSSES
from tests.helpers.head_loops import HEAD_LOOPS
from tests.metric_learning.losses.test_losses import CASES

D, SIZES = 66, {"num_classes": 4, "dim": 66}
LABELS = [0, 1, 2, 0, 1, 3, 2, 0, 1, 2]
VALUE, GRADIENT = 1e-6, 3e-6
# rows of length 1 are rounded to 6e-8: to 6e-4 of differences of 1e-4 (collapsed), to less of those
# that are left of an offset. More digits would take rows in float64.
UNIT_GRADIENT = {"collapsed": 2e-3, "offset": 2e-4}
LOSS_LOOPS = {}  # name -> (arguments, value of the loss, rows and labels in float64)
for loss_name, given, loss_loop in CASES:
    LOSS_LOOPS.setdefault(loss_name, (given | {"dim": D} if "dim" in given else given, loss_loop))


def noise(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(LABELS), D, generator=generator)


def rows_of(kind):
    """Rows and labels of a case."""
    x, y = 0.2 * noise(), list(LABELS)
    if kind == "collapsed":
        x = F.normalize(noise(1)[:1]) + 1e-4 * F.normalize(noise())
    elif kind == "offset":
        x = noise() + 1000
    elif kind == "tiny":
        x = 1e-6 * x
    elif kind == "one long row":
        x[3] *= 1e4
    elif kind == "two scales":  # half of the rows, some of each class
        x[::2] *= 1e4
    elif kind == "huge":
        x = 1e20 * x
    elif kind == "dead rows":  # one of a class, and all of another
        x[[at for at, label in enumerate(y) if label == y[0]][:1]] = 0
        x[[at for at, label in enumerate(y) if label == max(y)]] = 0
    elif kind == "single class":
        y = [1] * len(y)
    elif kind == "empty":
        x, y = x[:0], []
    elif kind == "without labels":
        y = [-1] * len(y)
    return x, y


DIGITS = ("ordinary", "collapsed", "offset", "tiny", "dead rows", "one long row", "two scales")
INPUTS = [
    *(
        (kind, torch.float32)
        for kind in (*DIGITS, "huge", "single class", "empty", "without labels")
    ),
    *((kind, torch.bfloat16) for kind in DIGITS),
    *((kind, torch.float16) for kind in ("ordinary", "tiny")),  # its range is its own
]
# rounded to half precision, rows become equal: which of them is the hardest is then open
TIES = (("hdc", "collapsed"), ("tuple_max", "offset"))


def made(name):
    torch.manual_seed(0)
    if name in HEADS:
        return HEADS[name](**SIZES)
    return METRIC_LOSSES[name](**LOSS_LOOPS[name][0])


def expected(name, x, y):
    """Value and gradient by the loops; nothing to add up is 0."""
    x = x.double().requires_grad_()
    if not y or max(y) < 0:
        return torch.zeros(()), torch.zeros_like(x)
    try:
        if name in HEADS:
            value = HEAD_LOOPS[name](list(x), y, made(name).double())
        else:
            value = LOSS_LOOPS[name][1](made(name).double(), list(x), y)
    except (TypeError, ValueError):  # a maximum or a logarithm of no items
        return torch.zeros(()), torch.zeros_like(x)
    if not value.requires_grad:  # a mean of no items
        return value, torch.zeros_like(x)
    return value.detach(), torch.autograd.grad(value, x)[0]


def test_no_entry_of_a_table_is_without_an_oracle():
    assert set(LOSS_LOOPS) == set(METRIC_LOSSES) - {"pml"}  # that one calls another library
    assert set(HEAD_LOOPS) == set(HEADS)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), INPUTS)
@pytest.mark.parametrize("name", [*LOSS_LOOPS, *HEAD_LOOPS])
def test_a_loss_has_the_digits_of_float64(name, kind, dtype):
    x, y = rows_of(kind)
    x = x.to(dtype)
    exact, exact_grad = expected(name, x, y)
    x.requires_grad_()
    if kind in ("empty", "without labels") and name == "soft_triple":
        exact = HEAD_LOOPS[name]([], [], made(name).double())  # its second term is of its weights
    value = made(name)(x, torch.tensor(y, dtype=torch.int64))
    (grad,) = torch.autograd.grad(value, x)
    half = dtype != torch.float32
    if half and (name, kind) in TIES:
        assert bool(value.isfinite())
        assert bool(grad.isfinite().all())
        return
    torch.testing.assert_close(  # a value beyond float32 is infinite
        value.double(), exact.detach().float().double(), rtol=VALUE, atol=VALUE * 0.1
    )
    # gradients beyond the dtype are infinite, those below its smallest number 0
    info = torch.finfo(dtype)
    within = exact_grad.abs() < 0.99 * info.max
    assert bool((grad[~within].abs() > 0.98 * info.max).all())
    size = float(exact_grad[within].norm())
    error = float((grad.double() - exact_grad)[within].norm())
    tolerance = (UNIT_GRADIENT.get(kind, GRADIENT) + 2 * info.eps * half) * size
    tolerance += half * info.smallest_normal * info.eps * within.numel() ** 0.5
    assert error <= tolerance + 1e-14, (error, size)


OF_DISTANCES = (
    *("batch_hard", "contrastive", "margin", "triplet", "lifted"),
    *("triplet_ratio", "hard_cluster"),
)
LENGTHS = ("one long row", "two scales", "huge")
QUICK = [
    *((name, "dead rows") for name in (*LOSS_LOOPS, *HEAD_LOOPS)),
    *((name, kind) for name in OF_DISTANCES for kind in ("collapsed", "offset")),
    *((name, kind) for name in (*OF_DISTANCES, "hdc") for kind in LENGTHS),
    ("magnet", "tiny"),
]


@pytest.mark.parametrize(("name", "kind"), QUICK)
def test_the_digits_that_lengths_and_near_rows_cost(name, kind):
    test_a_loss_has_the_digits_of_float64(name, kind, torch.float32)
