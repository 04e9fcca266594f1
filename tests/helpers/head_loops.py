"""Heads as loops over single rows and classes, written from their papers: the tests' oracle.

Each takes rows (list of (D,) float64 tensors), labels (list of int) and the head in float64, of
which only weights are read, and gives a number that torch can differentiate: the value of the first
call in training. Settings are the defaults.
"""

import math

import torch

from tests.helpers.metric_loops import d2, mean, unit


def length(a):
    """A dead row, all zeros, has no slope."""
    return a.square().sum().sqrt() if a.any() else 0 * a.sum()


def cosine(a, b):
    """0 where a row is dead, all zeros."""
    return a @ b / (length(a) * length(b)) if a.any() and b.any() else a @ b * 0


def entropy(logits, label):
    return torch.logsumexp(torch.stack(logits), 0) - logits[label]


def classified(logits_of):
    """Mean over the rows of the cross entropy of logits_of(row, label, head)."""

    def value(x, y, head):
        rows = zip(x, y, strict=True)
        return mean([entropy(logits_of(row, label, head), label) for row, label in rows])

    return value


def with_margin(target, other, scale=64.0):
    """Logits by scale * target(cos) for the label and scale * other(cos) for the rest."""

    def logits(row, label, head):
        cosines = [cosine(row, w) for w in head.weight]
        return [scale * (target if c == label else other)(v) for c, v in enumerate(cosines)]

    return classified(logits)


def same(cos):
    return cos


def arc(cos, margin=0.5):
    """ArcFace's released code: beyond pi the target keeps falling."""
    angle = torch.acos(cos)
    return (
        torch.cos(angle + margin) if angle + margin <= math.pi else cos - margin * math.sin(margin)
    )


def psi(cos, m=4):
    angle = torch.acos(cos)
    k = next(k for k in range(m) if k * math.pi / m <= angle <= (k + 1) * math.pi / m)
    return (-1) ** k * torch.cos(m * angle) - 2 * k


def multiplied(with_weight, m=4, lam=0.0):
    def logits(row, label, head):
        cosines = [cosine(row, w) for w in head.weight]
        cosines[label] = (lam * cosines[label] + psi(cosines[label], m)) / (1 + lam)
        lengths = [length(row) * (length(w) if with_weight else 1) for w in head.weight]
        return [a * v for a, v in zip(lengths, cosines, strict=True)]

    return classified(logits)


def softmax(row, label, head):
    layer = head.linear
    return [row @ w + b for w, b in zip(layer.weight, layer.bias, strict=True)]


def sub_centers(row, label, head):
    groups = head.weight.unflatten(0, (-1, 3))
    cosines = [max(cosine(row, w) for w in group) for group in groups]
    return [64 * (arc if c == label else same)(v) for c, v in enumerate(cosines)]


def circle(gamma=256):
    def logits(row, label, head):
        logits = []
        for c, w in enumerate(head.weight):
            v = cosine(row, w)
            weight = max(1.25 - v.item() if c == label else v.item() + 0.25, 0)
            logits.append(gamma * weight * (v - 0.75 if c == label else v - 0.25))
        return logits

    return classified(logits)


def proxy_nca(form="paper", scale=1.0):
    def value(x, y, head):
        values = []
        for row, label in zip(x, y, strict=True):
            d = [scale * d2(*unit([row, p])) for p in head.proxies]
            below = [torch.exp(-v) for c, v in enumerate(d) if form == "all" or c != label]
            values.append(d[label] + torch.log(sum(below)))
        return mean(values)

    return value


def proxy_anchor(alpha=32):
    def value(x, y, head):
        pulls, pushes = [], []
        for c, p in enumerate(head.proxies):
            s = [cosine(row, p) for row in x]
            own = [torch.exp(-alpha * (v - 0.1)) for v, at in zip(s, y, strict=True) if at == c]
            far = [alpha * (v + 0.1) for v, at in zip(s, y, strict=True) if at != c]
            pulls += [torch.log1p(sum(own))] if own else []
            pushes.append(torch.log1p(sum(map(torch.exp, far))) if far else 0 * p.sum())
        return mean(pulls) + mean(pushes)

    return value


def soft_triple(tau=0.2):
    def value(x, y, head):
        values = []
        for row, label in zip(x, y, strict=True):
            logits = []
            for c, centers in enumerate(head.weight):
                s = torch.stack([cosine(row, w) for w in centers])
                soft = (torch.softmax(s / 0.1, 0) * s).sum()
                logits.append(20 * (soft - 0.01 * (c == label)))
            values.append(entropy(logits, label))
        classes, k = head.weight.shape[:2]
        spread = [
            length(a / length(a) - b / length(b))
            for centers in head.weight
            for n, a in enumerate(centers)
            for b in centers[:n]
        ]
        return mean(values) + tau * sum(spread) / (classes * k * (k - 1))

    return value


def center(weight=0.003, over=len):
    """over: what the sum over the rows is divided by."""

    def value(x, y, head):
        far = [d2(row, head.centers[label]) for row, label in zip(x, y, strict=True)]
        return weight / 2 * sum(far) / over(x)

    return value


HEAD_LOOPS = {
    "arcface": with_margin(arc, same),
    "center": center(),
    "circle_softmax": circle(),
    "combined_margin": with_margin(lambda v: torch.cos(torch.acos(v) + 0.3) - 0.2, same),
    "cosface": with_margin(lambda v: v - 0.35, same),
    "l_softmax": multiplied(with_weight=True),
    "modified_softmax": classified(
        lambda row, label, head: [length(row) * cosine(row, w) for w in head.weight]
    ),
    "normface": classified(
        lambda row, label, head: [head.learned_scale * cosine(row, w) for w in head.weight]
    ),
    "proxy_anchor": proxy_anchor(),
    "proxy_nca": proxy_nca(),
    "soft_triple": soft_triple(),
    "softmax": classified(softmax),
    "sphereface": multiplied(with_weight=False),
    "sub_center_arcface": classified(sub_centers),
}
