"""Metric-learning losses as loops over single rows, written from their papers: the tests' oracle.

Each takes rows (list of (D,) float64 tensors) and labels (list of int) and gives a number that
torch can differentiate. Nothing here is shared with sslpipe.
"""

import math

import torch


def unit(rows):
    """A dead row, all zeros, stays so."""
    return [row / row.square().sum().sqrt() if row.any() else 0 * row for row in rows]


def dist(a, b):
    v = (a - b).square().sum()
    return v.sqrt() if v > 0 else 0 * v  # equal points have no direction


def d2(a, b):
    return (a - b).square().sum()


def hinge(v):
    return v if v > 0 else 0 * v


def soft(v):
    return torch.log1p(torch.exp(v))


def positives(y, i):
    return [j for j in range(len(y)) if j != i and y[j] == y[i]]


def negatives(y, i):
    return [j for j in range(len(y)) if y[j] != y[i]]


def pairs(y):
    return [(i, j) for i in range(len(y)) for j in range(len(y)) if i != j]


def triplets(y):
    everyone = range(len(y))
    return [(a, p, n) for a in everyone for p in positives(y, a) for n in negatives(y, a)]


def mean(values):
    """0 of no values."""
    return sum(values) / len(values) if values else torch.zeros(())


def by_pairs(x, y, near, far):
    """The mean of near(a, b) over the pairs of a class and of far(a, b) over the others."""
    return mean([(near if y[i] == y[j] else far)(x[i], x[j]) for i, j in pairs(y)])


def contrastive(x, y, margin=1.0, positive_margin=0.0):
    return by_pairs(
        *(x, y, lambda a, b: 0.5 * hinge(dist(a, b) - positive_margin) ** 2),
        lambda a, b: 0.5 * hinge(margin - dist(a, b)) ** 2,
    )


def chopra(x, y, q):
    def energy(a, b):
        return (a - b).abs().sum() / q

    return by_pairs(
        *(x, y, lambda a, b: 2 * q * energy(a, b) ** 2),
        lambda a, b: 2 * q * torch.exp(-2.77 * energy(a, b)),
    )


def cross_entropy(row, label, linear):
    logits = [weight @ row + bias for weight, bias in zip(linear.weight, linear.bias, strict=True)]
    top = max(v.item() for v in logits)
    return top + torch.log(sum(torch.exp(v - top) for v in logits)) - logits[label]


def deep_id2(x, y, linear, margin=1.0, weight=0.05):
    identification = [cross_entropy(row, label, linear) for row, label in zip(x, y, strict=True)]
    return mean(identification) + weight * contrastive(x, y, margin)


def near_and_far(x, y, distance=d2):
    """Of each triplet: how far the positive and the negative are from the anchor, of unit rows."""
    x = unit(x)
    return [(distance(x[a], x[p]), distance(x[a], x[n])) for a, p, n in triplets(y)]


def triplet(x, y, margin=0.2, distance=d2, penalty=hinge):
    return mean([penalty(near - far + margin) for near, far in near_and_far(x, y, distance)])


def chosen_triplet(x, y, kept, margin=0.2):
    """Of the triplets whose distances are kept(near, far), all of which count."""
    return mean([near - far + margin for near, far in near_and_far(x, y) if kept(near, far)])


def batch_hard(x, y, margin=0.2, soft_margin=False):
    values = []
    for a in range(len(y)):
        if positives(y, a) and negatives(y, a):
            far = max(dist(x[a], x[p]) for p in positives(y, a))
            near = min(dist(x[a], x[n]) for n in negatives(y, a))
            values.append(soft(far - near) if soft_margin else hinge(margin + far - near))
    return mean(values)


def ratio(x, a, p, n):
    near, far = torch.exp(dist(x[a], x[p])), torch.exp(dist(x[a], x[n]))
    return near / (near + far)


def triplet_ratio(x, y):
    """Squared distance of (d+, d-) from (0, 1)."""
    return mean([ratio(x, *t) ** 2 + (1 - (1 - ratio(x, *t))) ** 2 for t in triplets(y)])


def ranking_and_tags(x, y, tags, linears, weight, classified):
    values = []
    for t in triplets(y):
        k = t[0] if classified == "anchor" else t[2]
        entropies = [
            cross_entropy(x[k], tag, linear)
            for tag, linear in zip(tags[y[k]], linears, strict=True)
        ]
        values.append(ratio(x, *t) ** 2 + weight * mean(entropies))
    return mean(values)


def lmnn(x, y, matrix, margin=1.0, weight=1.0, neighbours=None):
    def d_a(i, j):
        gap = x[i] - x[j]
        return gap @ matrix @ gap

    pull = push = 0
    for i in range(len(y)):
        near = sorted(positives(y, i), key=lambda j: d2(x[i], x[j]).item())
        for j in near[:neighbours]:
            pull = pull + d_a(i, j)
            push = push + sum(hinge(margin + d_a(i, j) - d_a(i, k)) for k in negatives(y, i))
    return pull + weight * push


def tuple_max(x, y):
    x = unit(x)
    return mean(
        [
            hinge(max(x[a] @ x[n] for n in negatives(y, a)) - x[a] @ x[p])
            for a in range(len(y))
            for p in positives(y, a)
        ]
    )


def n_pair(x, y, l2_weight=0.002):
    first, second = {}, {}
    for i, label in enumerate(y):
        if label not in first:
            first[label] = i
        elif label not in second:
            second[label] = i
    values = []
    for label, p in second.items():
        a = first[label]
        others = [x[a] @ (x[q] - x[p]) for k, q in second.items() if k != label]
        top = max([v.item() for v in others] + [0.0])  # so that nothing overflows
        one = torch.tensor(math.exp(-top), dtype=x[a].dtype)
        penalty = l2_weight * (x[a].square().sum() + x[p].square().sum())
        values.append(top + torch.log(one + sum(torch.exp(v - top) for v in others)) + penalty)
    return mean(values)


def info_nce(x, y, temperature=0.07):
    x, values = unit(x), []
    for a in range(len(y)):
        for p in positives(y, a):
            own = torch.exp(x[a] @ x[p] / temperature)
            others = sum(torch.exp(x[a] @ x[n] / temperature) for n in negatives(y, a))
            values.append(-torch.log(own / (own + others)))
    return mean(values)


def nt_xent(x, y, temperature=0.1):
    x, values = unit(x), []
    for a in range(len(y)):
        everyone = sum(torch.exp(x[a] @ x[k] / temperature) for k in range(len(y)) if k != a)
        for p in positives(y, a):
            values.append(-torch.log(torch.exp(x[a] @ x[p] / temperature) / everyone))
    return mean(values)


def sup_con(x, y, temperature=0.1, form="out"):
    x, values = unit(x), []
    for a in range(len(y)):
        if positives(y, a):
            everyone = sum(torch.exp(x[a] @ x[k] / temperature) for k in range(len(y)) if k != a)
            shares = [torch.exp(x[a] @ x[p] / temperature) / everyone for p in positives(y, a)]
            if form == "out":
                values.append(-mean([torch.log(share) for share in shares]))
            else:
                values.append(-torch.log(mean(shares)))
    return mean(values)


def nca(x, y, form="log", scale=1.0):
    values = []
    for i in range(len(y)):
        if positives(y, i):
            p = sum(torch.exp(-scale * d2(x[i], x[j])) for j in positives(y, i))
            p = p / sum(torch.exp(-scale * d2(x[i], x[k])) for k in range(len(y)) if k != i)
            values.append(-torch.log(p) if form == "log" else 1 - p)
    return mean(values)


def lifted(x, y, alpha=1.0):
    total, count = 0, 0
    for i in range(len(y)):
        for j in range(i + 1, len(y)):
            if y[i] == y[j]:
                near = sum(torch.exp(alpha - dist(x[i], x[k])) for k in negatives(y, i))
                near = near + sum(torch.exp(alpha - dist(x[j], x[k])) for k in negatives(y, j))
                total = total + hinge(torch.log(near) + dist(x[i], x[j])) ** 2
                count += 1
    return total / (2 * count)


def multi_similarity(x, y, alpha=2.0, beta=50.0, base=1.0):
    x, values = unit(x), []
    for i in range(len(y)):
        pull = sum(torch.exp(-alpha * (x[i] @ x[k] - base)) for k in positives(y, i))
        push = sum(torch.exp(beta * (x[i] @ x[k] - base)) for k in negatives(y, i))
        one = torch.ones((), dtype=x[0].dtype)
        values.append(torch.log(one + pull) / alpha + torch.log(one + push) / beta)
    return mean(values)


def margin(x, y, alpha=0.2, beta=None, nu=0.0):
    x, values = unit(x), []
    for i, j in pairs(y):
        b = 1.2 if beta is None else beta[y[i] if len(beta) > 1 else 0]
        sign = 1 if y[i] == y[j] else -1
        penalty = 0 if beta is None else nu * b
        values.append(hinge(alpha + sign * (dist(x[i], x[j]) - b)) + penalty)
    return mean(values)


def angular(x, y, angle_deg=45.0):
    x, values, t = unit(x), [], math.tan(math.radians(angle_deg)) ** 2
    for a in range(len(y)):
        for p in positives(y, a):
            total = torch.ones((), dtype=x[a].dtype)
            for n in negatives(y, a):
                f = 4 * t * (x[a] + x[p]) @ x[n] - 2 * (1 + t) * x[a] @ x[p]
                total = total + torch.exp(f)
            values.append(torch.log(total))
    return mean(values)


def tuplet_margin(x, y, scale=64.0, margin=0.1, variance_weight=0.5, epsilon=0.01):
    x, values = unit(x), []
    for a in range(len(y)):
        for p in positives(y, a):
            own = torch.cos(torch.acos(x[a] @ x[p]) - margin)
            total = torch.ones((), dtype=x[a].dtype)
            for n in negatives(y, a):
                total = total + torch.exp(scale * (x[a] @ x[n] - own))
            values.append(torch.log(total))
    near = [x[i] @ x[j] for i, j in pairs(y) if y[i] == y[j]]
    far = [x[i] @ x[j] for i, j in pairs(y) if y[i] != y[j]]
    pull = mean([hinge((1 - epsilon) * mean(near) - s) ** 2 for s in near])
    push = mean([hinge(s - (1 + epsilon) * mean(far)) ** 2 for s in far])
    return mean(values) + variance_weight * (pull + push)


def class_means(x, y):
    return {c: mean([row for row, label in zip(x, y, strict=True) if label == c]) for c in set(y)}


def tree_margins(x, y, beta, levels):
    """alpha_z for each ordered pair of classes: the levels one by one, merging sets of classes.

    Dead rows, all zeros, are skipped; a class of none else has the margin beta.
    """
    alive = [(row.detach(), c) for row, c in zip(unit(x), y, strict=True) if row.any()]
    means = class_means([row for row, _ in alive], [c for _, c in alive])
    within = dict.fromkeys(means, 0.0)  # mean over pairs of two rows; 0 for a class with one
    for c in means:
        own = [row for row, label in alive if label == c]
        apart = [float(d2(a, b)) for i, a in enumerate(own) for b in own[:i]]
        within[c] = sum(apart) / max(1, len(apart))
    between = {(c, k): 2 - 2 * float(means[c] @ means[k]) for c in means for k in means}
    start = mean(list(within.values()))
    nodes, merged = [{c} for c in means], {}
    for level in range(1, levels + 1):
        threshold = level * (4 - start) / levels + start
        changed = True
        while changed:
            changed = False
            for one in nodes:
                for two in nodes:
                    near = any(between[c, k] < threshold for c in one for k in two)
                    if one is not two and near and not changed:
                        for c in one:
                            for k in two:
                                merged[c, k] = merged[k, c] = threshold
                        nodes = [n for n in nodes if n is not one and n is not two] + [one | two]
                        changed = True
    return {
        (c, k): beta + merged[c, k] - within[c] if c in means and k in means else beta
        for c in set(y)
        for k in set(y) - {c}
    }


def hierarchical_triplet(x, y, beta=0.1, levels=16):
    margins, apart = tree_margins(x, y, beta, levels), near_and_far(x, y)
    each = zip(apart, triplets(y), strict=True)
    return mean([hinge(p - n + margins[y[i], y[k]]) for (p, n), (i, _, k) in each]) / 2


def magnet(x, y, clusters=None, alpha=1.0):
    keys = list(zip(y, clusters or [0] * len(y), strict=True))
    means = class_means(x, keys)
    s2 = sum(d2(row, means[key]) for row, key in zip(x, keys, strict=True)) / (len(x) - 1)
    values = []
    for row, key in zip(x, keys, strict=True):
        others = sum(torch.exp(-d2(row, m) / (2 * s2)) for k, m in means.items() if k[0] != key[0])
        values.append(hinge(d2(row, means[key]) / (2 * s2) + alpha + torch.log(others)))
    return mean(values)


def hard_cluster(x, y, margin=0.2):
    means = class_means(x, y)
    values = []
    for c, center in means.items():
        far = max(dist(center, x[i]) for i in range(len(y)) if y[i] == c)
        near = min(dist(center, m) for k, m in means.items() if k != c)
        values.append(hinge(margin + far - near))
    return mean(values)


def unified(x, y, gamma=80.0, margin=0.4):
    x, values = unit(x), []
    for i in range(len(y)):
        if positives(y, i) and negatives(y, i):
            terms = [
                torch.exp(gamma * (x[i] @ x[n] - x[i] @ x[p] + margin))
                for n in negatives(y, i)
                for p in positives(y, i)
            ]
            values.append(torch.log(1 + sum(terms)))
    return mean(values)


def circle(x, y, gamma=80.0, margin=0.4):
    x, values = unit(x), []
    for i in range(len(y)):
        if positives(y, i) and negatives(y, i):
            push = pull = 0
            for n in negatives(y, i):
                s = x[i] @ x[n]
                push = push + torch.exp(gamma * max(s.item() + margin, 0) * (s - margin))
            for p in positives(y, i):
                s = x[i] @ x[p]
                pull = pull + torch.exp(-gamma * max(1 + margin - s.item(), 0) * (s - 1 + margin))
            values.append(torch.log(1 + push * pull))
    return mean(values)


def hdc(x, y, shares, margin=1.0):
    width = len(x[0]) // len(shares)
    left = {kind: [(i, j) for i, j in pairs(y) if (y[i] == y[j]) == kind] for kind in (True, False)}
    total, last = 0, None
    for k, share in enumerate(shares):
        part = [row[k * width : (k + 1) * width] for row in x]
        if k:
            for kind, sign in ((True, -1), (False, 1)):
                keep = max(1, math.ceil(share / shares[k - 1] * len(left[kind])))
                hardness = [sign * dist(last[i], last[j]).item() for i, j in left[kind]]
                if not hardness:
                    continue
                bound = sorted(hardness)[keep - 1] + 1e-12  # (i, j) and (j, i) stay together
                left[kind] = [ij for ij, h in zip(left[kind], hardness, strict=True) if h <= bound]
        total = total + mean(
            [0.5 * d2(part[i], part[j]) for i, j in left[True]]
            + [0.5 * hinge(margin - dist(part[i], part[j])) ** 2 for i, j in left[False]]
        )
        last = part
    return total
