"""Metric-learning losses as loops over single rows, written from their papers: the tests' oracle.

Each takes rows (list of (D,) float64 tensors) and labels (list of int) and gives a number that
torch can differentiate. Nothing here is shared with sslpipe.
"""

import itertools
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


def log_sum(terms):
    """Log of the sum of e^term, at any scale."""
    terms = [*terms]
    if not terms:
        raise ValueError("no terms")
    return torch.logsumexp(torch.stack(terms), 0)


def hinge(v):
    return v if v > 0 else 0 * v


def soft(v):
    return log_sum([v, 0 * v])  # log(1 + e^v)


def positives(y, i):
    return [j for j in range(len(y)) if j != i and y[j] == y[i]]


def negatives(y, i):
    return [j for j in range(len(y)) if y[j] != y[i]]


def pairs(y):
    return [(i, j) for i in range(len(y)) for j in range(len(y)) if i != j]


def positive_pairs(y):
    return [(i, j) for i, j in pairs(y) if y[i] == y[j]]


def triplets(y):
    return [(a, p, n) for a, p in positive_pairs(y) for n in negatives(y, a)]


def with_both(y):
    """The anchors that have a positive and a negative."""
    return [i for i in range(len(y)) if positives(y, i) and negatives(y, i)]


def mean(values):
    """0 of no values."""
    return sum(values) / len(values) if values else torch.zeros(())


def one_more(terms):
    """log(1 + the sum of e^term)."""
    return torch.log(1 + sum(torch.exp(term) for term in terms) + torch.zeros(()).double())


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
    logits = torch.stack([w @ row + b for w, b in zip(linear.weight, linear.bias, strict=True)])
    return torch.logsumexp(logits, 0) - logits[label]


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
    for a in with_both(y):
        far = max(dist(x[a], x[p]) for p in positives(y, a))
        near = min(dist(x[a], x[n]) for n in negatives(y, a))
        values.append(soft(far - near) if soft_margin else hinge(margin + far - near))
    return mean(values)


def ratio(x, a, p, n):
    """Return e^near / (e^near + e^far)."""
    near, far = dist(x[a], x[p]), dist(x[a], x[n])
    return torch.exp(near - log_sum([near, far]))


def triplet_ratio(x, y):
    """Squared distance of (d+, d-) from (0, 1)."""
    return mean([ratio(x, *t) ** 2 + (1 - (1 - ratio(x, *t))) ** 2 for t in triplets(y)])


def ranking_and_tags(x, y, tags, linears, weight, classified):
    values = []
    for t in triplets(y):
        k = t[0] if classified == "anchor" else t[2]
        entropies = map(cross_entropy, [x[k]] * len(linears), tags[y[k]], linears)
        values.append(ratio(x, *t) ** 2 + weight * mean([*entropies]))
    return mean(values)


def lmnn(x, y, matrix, margin=1.0, weight=1.0, neighbours=None):
    def d_a(i, j):
        return (x[i] - x[j]) @ matrix @ (x[i] - x[j])

    pull = push = 0
    for i in range(len(y)):
        near = sorted(positives(y, i), key=lambda j: d2(x[i], x[j]).item())
        for j in near[:neighbours]:
            pull = pull + d_a(i, j)
            push = push + sum(hinge(margin + d_a(i, j) - d_a(i, k)) for k in negatives(y, i))
    return pull + weight * push


def tuple_max(x, y):
    x = unit(x)
    hardest = {a: max(x[a] @ x[n] for n in negatives(y, a)) for a, _ in positive_pairs(y)}
    return mean([hinge(hardest[a] - x[a] @ x[p]) for a, p in positive_pairs(y)])


def n_pair(x, y, l2_weight=0.002):
    """A class's first row is its anchor, its second its positive."""
    rows_of = {c: [i for i, label in enumerate(y) if label == c][:2] for c in set(y)}
    used = [rows for rows in rows_of.values() if len(rows) == 2]
    values = []
    for a, p in used:
        others = torch.stack([x[a] @ (x[q] - x[p]) for _, q in used])  # its own: 0
        penalty = l2_weight * (x[a].square().sum() + x[p].square().sum())
        values.append(torch.logsumexp(others, 0) + penalty)
    return mean(values)


def exponentials(x, temperature):
    """e(i, j) = e^(cosine / temperature), and e(i, [j, ...]) their sum."""
    x = unit(x)

    def e(i, others):
        several = others if isinstance(others, list) else [others]
        return sum(torch.exp(x[i] @ x[k] / temperature) for k in several)

    return e


def info_nce(x, y, temperature=0.07):
    e = exponentials(x, temperature)
    return mean(
        [-torch.log(e(a, p) / (e(a, p) + e(a, negatives(y, a)))) for a, p in positive_pairs(y)]
    )


def others(y, i):
    return [j for j in range(len(y)) if j != i]


def nt_xent(x, y, temperature=0.1):
    e = exponentials(x, temperature)
    return mean([-torch.log(e(a, p) / e(a, others(y, a))) for a, p in positive_pairs(y)])


def sup_con(x, y, temperature=0.1, form="out"):
    e, values = exponentials(x, temperature), []
    for a in range(len(y)):
        if positives(y, a):
            shares = [e(a, p) / e(a, others(y, a)) for p in positives(y, a)]
            logs = mean([torch.log(share) for share in shares])
            values.append(-logs if form == "out" else -torch.log(mean(shares)))
    return mean(values)


def nca(x, y, form="log", scale=1.0):
    values = []
    for i in range(len(y)):
        if positives(y, i):
            log_p = log_sum(-scale * d2(x[i], x[j]) for j in positives(y, i))
            log_p = log_p - log_sum(-scale * d2(x[i], x[k]) for k in others(y, i))
            values.append(-log_p if form == "log" else 1 - torch.exp(log_p))
    return mean(values)


def lifted(x, y, alpha=1.0):
    values = []
    for i, j in positive_pairs(y):
        near = log_sum(alpha - dist(x[k], x[n]) for k in (i, j) for n in negatives(y, k))
        values.append(hinge(near + dist(x[i], x[j])) ** 2 / 2)
    return mean(values)


def multi_similarity(x, y, alpha=2.0, beta=50.0, base=1.0):
    x, values = unit(x), []
    for i in range(len(y)):
        pull = one_more(-alpha * (x[i] @ x[k] - base) for k in positives(y, i))
        push = one_more(beta * (x[i] @ x[k] - base) for k in negatives(y, i))
        values.append(pull / alpha + push / beta)
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
    x, t = unit(x), math.tan(math.radians(angle_deg)) ** 2

    def f(a, p, n):
        return 4 * t * (x[a] + x[p]) @ x[n] - 2 * (1 + t) * x[a] @ x[p]

    return mean([one_more(f(a, p, n) for n in negatives(y, a)) for a, p in positive_pairs(y)])


def tuplet_margin(x, y, scale=64.0, margin=0.1, variance_weight=0.5, epsilon=0.01):
    x, values = unit(x), []
    for a, p in positive_pairs(y):
        own = torch.cos(torch.acos(x[a] @ x[p]) - margin)
        values.append(one_more(scale * (x[a] @ x[n] - own) for n in negatives(y, a)))
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
    node, merged = {c: {c} for c in means}, {}  # class -> what it has merged into
    for level in range(1, levels + 1):
        threshold = level * (4 - start) / levels + start
        for c, k in sorted(between, key=between.get):
            if between[c, k] < threshold and node[c] is not node[k]:
                for i, j in itertools.product(node[c], node[k]):
                    merged[i, j] = merged[j, i] = threshold
                union = node[c] | node[k]
                node |= dict.fromkeys(union, union)
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
        far = log_sum(-d2(row, m) / (2 * s2) for k, m in means.items() if k[0] != key[0])
        values.append(hinge(d2(row, means[key]) / (2 * s2) + alpha + far))
    return mean(values)


def hard_cluster(x, y, margin=0.2):
    means, values = class_means(x, y), []
    for c, center in means.items():
        far = max(dist(center, x[i]) for i in range(len(y)) if y[i] == c)
        near = min(dist(center, m) for k, m in means.items() if k != c)
        values.append(hinge(margin + far - near))
    return mean(values)


def unified(x, y, gamma=80.0, margin=0.4):
    x = unit(x)
    return mean(
        [
            one_more(
                gamma * (x[i] @ x[n] - x[i] @ x[p] + margin)
                for n in negatives(y, i)
                for p in positives(y, i)
            )
            for i in with_both(y)
        ]
    )


def circle(x, y, gamma=80.0, margin=0.4):
    x, values = unit(x), []
    for i in with_both(y):
        push = pull = 0
        for s in (x[i] @ x[n] for n in negatives(y, i)):
            push = push + torch.exp(gamma * max(s.item() + margin, 0) * (s - margin))
        for s in (x[i] @ x[p] for p in positives(y, i)):
            pull = pull + torch.exp(-gamma * max(1 + margin - s.item(), 0) * (s - 1 + margin))
        values.append(torch.log(1 + push * pull))
    return mean(values)


def hdc(x, y, shares, margin=1.0):
    """Branch by branch, of the pairs of a class and of two that are left for it."""
    width, last, total = len(x[0]) // len(shares), None, 0
    near, far = positive_pairs(y), [(i, j) for i, j in pairs(y) if y[i] != y[j]]
    for k, share in enumerate(shares):
        part = [row[k * width : (k + 1) * width] for row in x]
        if last is not None:
            near, far = (
                hardest(some, last, share / shares[k - 1], sign)
                for some, sign in ((near, -1), (far, 1))
            )
        total = total + mean(
            [0.5 * d2(part[i], part[j]) for i, j in near]
            + [0.5 * hinge(margin - dist(part[i], part[j])) ** 2 for i, j in far]
        )
        last = part
    return total


def hardest(some, x, share, sign):
    """That share of the pairs, those with the least sign * distance."""
    order = {(i, j): sign * dist(x[i], x[j]).item() for i, j in some}
    keep = max(1, math.ceil(share * len(some)))
    bound = max(sorted(order.values())[:keep], default=0) + 1e-12  # (i, j) and (j, i) both
    return [pair for pair in some if order[pair] <= bound]
