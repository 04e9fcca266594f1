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


def multiplied(with_weight):
    def logits(row, label, head):
        return [
            length(row)
            * (length(w) if with_weight else 1)
            * (psi if c == label else same)(cosine(row, w))
            for c, w in enumerate(head.weight)
        ]

    return classified(logits)


def softmax(row, label, head):
    layer = head.linear
    return [row @ w + b for w, b in zip(layer.weight, layer.bias, strict=True)]


def sub_centers(row, label, head):
    groups = head.weight.unflatten(0, (-1, 3))
    cosines = [max(cosine(row, w) for w in group) for group in groups]
    return [64 * (arc if c == label else same)(v) for c, v in enumerate(cosines)]


def curricular(x, y, head):
    targets = [cosine(row, head.weight[label]).detach() for row, label in zip(x, y, strict=True)]
    t = 0.01 * mean(targets)

    def logits(row, label, head):
        cosines = [cosine(row, w) for w in head.weight]
        threshold = torch.cos(torch.acos(cosines[label]) + 0.5)
        return [
            64 * (arc(v) if c == label else v * (t + v) if v > threshold else v)
            for c, v in enumerate(cosines)
        ]

    return classified(logits)(x, y, head)


def adaptive(x, y, head):
    norms = torch.stack([length(row).detach().clamp(0.001, 100) for row in x])
    center = 0.99 * 20 + 0.01 * norms.mean()
    spread = 0.99 * 100 + 0.01 * norms.std()

    def logits(row, label, head):
        norm = length(row).detach().clamp(0.001, 100)
        quality = (0.333 * (norm - center) / (spread + 0.001)).clamp(-1, 1)
        cosines = [cosine(row, w) for w in head.weight]
        angle = (torch.acos(cosines[label]) - 0.4 * quality).clamp(0, math.pi)
        cosines[label] = torch.cos(angle) - 0.4 * (1 + quality)
        return [64 * v for v in cosines]

    return classified(logits)(x, y, head)


def circle(row, label, head):
    logits = []
    for c, w in enumerate(head.weight):
        v = cosine(row, w)
        weight = max(1.25 - v.item(), 0) if c == label else max(v.item() + 0.25, 0)
        logits.append(256 * weight * (v - 0.75 if c == label else v - 0.25))
    return logits


def proxy_nca(x, y, head):
    values = []
    for row, label in zip(x, y, strict=True):
        d = [d2(*unit([row, p])) for p in head.proxies]
        others = sum(torch.exp(-v) for c, v in enumerate(d) if c != label)
        values.append(d[label] + torch.log(others))
    return mean(values)


def proxy_anchor(x, y, head):
    pulls, pushes = [], []
    for c, p in enumerate(head.proxies):
        s = [cosine(row, p) for row in x]
        own = [torch.exp(-32 * (v - 0.1)) for v, label in zip(s, y, strict=True) if label == c]
        far = [torch.exp(32 * (v + 0.1)) for v, label in zip(s, y, strict=True) if label != c]
        pulls += [torch.log1p(sum(own))] if own else []
        pushes.append(torch.log1p(sum(far)) if far else 0 * p.sum())
    return mean(pulls) + mean(pushes)


def soft_triple(x, y, head):
    values = []
    for row, label in zip(x, y, strict=True):
        logits = []
        for c, centers in enumerate(head.weight):
            s = torch.stack([cosine(row, w) for w in centers])
            share = torch.softmax(s / 0.1, 0)
            logits.append(20 * ((share * s).sum() - 0.01 * (c == label)))
        values.append(entropy(logits, label))
    classes, k = head.weight.shape[:2]
    spread = [
        length(a / length(a) - b / length(b))
        for centers in head.weight
        for n, a in enumerate(centers)
        for b in centers[:n]
    ]
    return mean(values) + 0.2 * sum(spread) / (classes * k * (k - 1))


def center(x, y, head):
    return 0.003 / 2 * mean([d2(row, head.centers[label]) for row, label in zip(x, y, strict=True)])


HEAD_LOOPS = {
    "adaface": adaptive,
    "arcface": with_margin(arc, same),
    "center": center,
    "circle_softmax": classified(circle),
    "combined_margin": with_margin(lambda v: torch.cos(torch.acos(v) + 0.3) - 0.2, same),
    "cosface": with_margin(lambda v: v - 0.35, same),
    "curricularface": curricular,
    "l_softmax": multiplied(with_weight=True),
    "modified_softmax": classified(
        lambda row, label, head: [length(row) * cosine(row, w) for w in head.weight]
    ),
    "normface": with_margin(same, same, 20.0),
    "proxy_anchor": proxy_anchor,
    "proxy_nca": proxy_nca,
    "soft_triple": soft_triple,
    "softmax": classified(softmax),
    "sphereface": multiplied(with_weight=False),
    "sub_center_arcface": classified(sub_centers),
}
