"""What a build or an index made of what was there: the report printed, and build-report.json.

It answers whether what went in is what the user meant: what became a split, a class and a sample,
what was skipped and why, and what looks like a slip.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict

from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.errors import DataError, counted, for_caller, listed, one_line, shown
from sslpipe.files import read_json
from sslpipe.portable import write_atomically
from sslpipe.sharding.copies import copies_across
from sslpipe.sharding.split_names import names_like_splits, split_of

FILE = "build-report.json"  # beside dataset.json
UNSEEN = "_unseen"  # ends the name of a split of classes that its split lacks
MOST_NAMED = 3  # names in a line
MOST_KINDS = 6  # such as suffixes, in a line
MOST_LINES = 24  # of skipped, of images, of doubts: one screen
GAPS = frozenset(["nan", "none", "null", "<na>", "n/a", "na"])  # in lower case
_BETWEEN = re.compile(r"[|;,]")  # labels in one cell
_NUMBERS = re.compile(r"[\d\s]+")  # labels with blanks between them: 16 7, but no Boeing 737 800
_NUMBER = re.compile(r"0*(\d+)(\.0+)?")  # 1, 01 and 1.0 are one: 1
_BESIDE = re.compile(r"^[\s\['\"({]+|[\s\]'\")}]+$")  # a label in a list of Python or JSON
OVERLOOKED = "case, blanks or zeros"  # what two names may differ by, as `_plain` says
SHORTEST_NEAR = 4  # letters of the longer of two names that may be a slip of each other


def _encodable(text: str) -> str:
    """Escape what UTF-8 cannot hold, as of names in another encoding."""
    return text.encode("utf-8", "backslashreplace").decode()


Text = Annotated[str, AfterValidator(_encodable)]


class Group(BaseModel):
    """Files or samples of one kind, with one of them."""

    model_config = ConfigDict(frozen=True)
    what: Text  # as in "hidden files and folders", "animated; the first frame is used"
    count: int
    example: Text = ""
    kind: Text = ""  # one of several of `what`, such as .heic of "files of other kinds"


class Tally:
    """Counts things by what they are and their kind, with the first of each as the example."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[str, str]]()
        self._examples: dict[tuple[str, str], str] = {}

    def add(self, what: str, example: str, kind: str = "", count: int = 1) -> None:
        """Add one thing, or several of the same kind."""
        self._counts[what, kind] += count
        self._examples.setdefault((what, kind), example)

    def groups(self, where: str = "") -> list[Group]:
        """Return the kinds in the order in which they came; `where` is added to the examples."""
        return [
            Group(what=what, kind=kind, count=count, example=self._examples[what, kind] + where)
            for (what, kind), count in self._counts.items()
        ]


class SplitCounts(BaseModel):
    """The samples of a split and its classes; (name, samples) of the smallest and the largest."""

    model_config = ConfigDict(frozen=True)
    samples: int
    shards: int
    bytes: int  # of the shards
    unlabelled: int
    classes: int
    smallest: tuple[Text, int] | None
    largest: tuple[Text, int] | None


class Report(BaseModel):
    """All that is said after a build or an index."""

    model_config = ConfigDict(frozen=True)
    splits: dict[Text, SplitCounts]
    left_out: list[Group] = []
    looked_at: int = 0  # images that were decoded for the next
    images: list[Group] = []  # samples that lose something, or are unusual: "CMYK, ..."
    doubts: list[Text] = []  # what looks like a slip, a sentence each
    split_by_class: bool = False  # the user asked for splits without a common class

    def lines(self) -> list[str]:
        """Return it as text, a line each, at most a screen; nothing in them moves the cursor."""
        lines = []
        for name, split in self.splits.items():
            size = f"{counted(split.shards, 'shard')}, {split.bytes / 1e6:,.1f} MB"
            line = f"split {name}: {counted(split.samples, 'image')} ({size})"
            if split.largest and split.smallest:
                small, least = split.smallest
                large, most = split.largest
                line += f", {counted(split.classes, 'class')} of {least:,}"
                if most > least:
                    line += f" ({_name(small)}) to {most:,} ({_name(large)})"
            if split.unlabelled:
                line += f", {split.unlabelled:,} without a label"
            lines.append(line)
        lines += [f"skipped: {line}" for line in group_lines(self.left_out)]
        of = f" of {self.looked_at:,}" if self.looked_at else ""
        lines += [f"images: {for_caller(line)}" for line in group_lines(self.images, of)]
        lines += [f"look at this: {for_caller(doubt)}" for doubt in self.doubts]
        if len(lines) > MOST_LINES:
            more = len(lines) - MOST_LINES
            lines = [*lines[:MOST_LINES], f"... and {more:,} lines more in {FILE}"]
        return [one_line(line) for line in lines]


def group_lines(groups: Sequence[Group], of: str = "") -> list[str]:
    """Write a line for each `what`, the most frequent first, with its kinds and one example."""
    by_what: dict[str, list[Group]] = defaultdict(list)
    for each in groups:
        by_what[each.what].append(each)
    counts = {what: sum(each.count for each in members) for what, members in by_what.items()}
    lines = []
    for what, members in sorted(by_what.items(), key=lambda item: (-counts[item[0]], item[0])):
        members = sorted(members, key=lambda each: (-each.count, each.kind))
        kinds = [f"{_name(each.kind)} {each.count:,}" for each in members if each.kind]
        listed = f" ({', '.join(kinds[:MOST_KINDS])}{', ...' * (len(kinds) > MOST_KINDS)})"
        example = f", such as {_name(members[0].example)}" if members[0].example else ""
        lines.append(f"{what}: {counts[what]:,}{of}{listed * bool(kinds)}{example}")
    return lines


def merge_groups(groups: Iterable[Group]) -> list[Group]:
    """Add up groups of the same kind, as of several shards."""
    tally = Tally()
    for each in groups:
        tally.add(each.what, each.example, each.kind, each.count)
    return tally.groups()


def write_report(
    folder: Path,
    *,
    left_out: Sequence[Group] = (),
    looked_at: int = 0,
    images: Sequence[Group] = (),
    doubts: Sequence[str] = (),
    split_by_class: bool = False,
    digests: Mapping[str, bytes] | None = None,
    workers: int = 2,
) -> Report:
    """Describe a finished data set, also in build-report.json; splits are those of dataset.json.

    Args:
        folder: It holds dataset.json.
        left_out: What of the source did not become a sample, and why.
        looked_at: Images that were decoded for `images`.
        images: Samples that lose something, or are unusual.
        doubts: What else looks like a slip.
        split_by_class: The user asked for splits without a common class.
        digests: Of the images of shards that need not be read for it, see `copies_across`.
        workers: Threads that look for images of several splits.
    """
    index = load_index(folder)
    counts = {name: class_counts(index, name) for name in index.manifest.splits}
    of_classes = class_doubts(counts, index.manifest.classes, split_by_class=split_by_class)
    report = Report(
        splits={name: _describe(index, name, by_class) for name, by_class in counts.items()},
        left_out=list(left_out),
        looked_at=looked_at,
        images=list(images),
        doubts=[
            *doubts,
            *_unknown_splits(counts),
            *copies_across(index, workers, digests or {}),
            *of_classes,
        ],
        split_by_class=split_by_class,
    )
    write_atomically(folder / FILE, report.model_dump_json(indent=1) + "\n")
    return report


def was_split_by_class(folder: Path) -> bool:
    """Return whether the build whose report lies in a folder was asked to split by class."""
    try:
        return read_json(folder / FILE, Report).split_by_class
    except DataError:  # there is none, or a damaged one, which is written anew
        return False


def class_counts(index: DatasetIndex, split: str) -> dict[str, int]:
    """Count the samples of each class of a split, by name; those without a label are omitted."""
    samples = index.split(split)
    labels, counts = np.unique(samples.labels, return_counts=True)  # labels may be 10^12
    return {
        name: count
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True)
        if (name := samples.class_name(label)) is not None
    }


def _describe(index: DatasetIndex, split: str, counts: Mapping[str, int]) -> SplitCounts:
    samples = len(index.split(split))
    smallest = min(counts.items(), key=lambda item: item[1]) if counts else None
    largest = max(counts.items(), key=lambda item: item[1]) if counts else None
    return SplitCounts(
        samples=samples,
        shards=len(index.manifest.splits[split]),
        bytes=sum(shard.bytes for shard in index.manifest.splits[split]),
        unlabelled=samples - sum(counts.values()),
        classes=len(counts),
        smallest=smallest,
        largest=largest,
    )


def _unknown_splits(names: Collection[str]) -> list[str]:
    """Name splits of which no name says what it is for, as of a column of 0 and 1; [] for none."""
    if len(names) < 2 or any(split_of(name) for name in names):
        return []
    return [
        f"no split is train, val or test, but {_names(names)}: training and evaluations read train "
        "and test unless told otherwise; write these names where the splits are named"
    ]


# --- slips in names of classes


def check_classes(classes: Mapping[str, Iterable[str]]) -> None:
    """Raise DataError where train has Cat and test has cat, and neither has the other's."""
    owners = _owners(classes)
    for first, *others in alike_names(owners):
        for other in others:
            if not owners[first] & owners[other]:
                raise DataError(
                    f"class {shown(first)} of {_names(owners[first])} and {shown(other)} of "
                    f"{_names(owners[other])} are two classes by their names; rename one, or "
                    "build without classes by --no-labels"
                )


def class_doubts(
    counts: Mapping[str, Mapping[str, int]],
    classes: Sequence[str] = (),
    *,
    split_by_class: bool = False,
) -> list[str]:
    """Name what looks like a slip in the classes of the splits, and in their names.

    Args:
        counts: Samples of each class of a split, by name, without those that it lacks.
        classes: All names; one without a sample in any split is mentioned.
        split_by_class: The user asked for splits without a common class, which is no slip then.
    """
    labelled = {split: by_class for split, by_class in counts.items() if by_class}
    names = sorted({name for by_class in labelled.values() for name in by_class})
    doubts = []
    # names
    doubts += _doubt("named like a split", names_like_splits(names))
    gaps = [name for name in names if name.casefold() in GAPS]
    doubts += _doubt(
        "named as programs write a gap", gaps, "; where these have no label, name none"
    )
    doubts += _doubt(
        "whose names are lists of labels",
        _several_labels(names),
        "; a sample has one class, and each list became one",
    )
    alike = [_names(spellings) for spellings in alike_names(names)]
    if alike:
        doubts.append(
            f"{counted(len(alike), 'group')} of classes that differ by {OVERLOOKED}: "
            f"{'; '.join(alike[:MOST_NAMED])}"
        )
    doubts += _near_names(labelled)
    # classes that a split lacks, with those that --unseen-classes took out of it
    labelled = _with_unseen(labelled)
    in_all = sum(len(by_class) for by_class in labelled.values())
    if len(labelled) > 1 and in_all == len(names):  # each is in one split alone
        sizes = ", ".join(f"{len(by_class):,} in {split}" for split, by_class in labelled.items())
        if not split_by_class:
            doubts.append(f"no class is in two splits: {sizes}")
        labelled = {}
    for split, by_class in labelled.items():
        lacking = [name for name in names if name not in by_class]
        if lacking:
            doubts.append(
                f"split {split} lacks {len(lacking):,} of {len(names):,} classes: {_names(lacking)}"
            )
    # images
    total = Counter[str]()
    for by_class in counts.values():
        total.update(by_class)
    doubts += _doubt("of one image", [name for name, count in total.items() if count == 1])
    doubts += _doubt("without an image", [name for name in classes if name not in total])
    return doubts


def _doubt(what: str, names: Sequence[str], remedy: str = "") -> list[str]:
    """Return a sentence on some classes; [] where there are none."""
    return [f"{counted(len(names), 'class')} {what}: {_names(names)}{remedy}"] if names else []


def _owners(classes: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return the splits that have each class."""
    owners: dict[str, set[str]] = defaultdict(set)
    for split, names in classes.items():
        for name in names:
            owners[name].add(split)
    return owners


def alike_names(names: Iterable[str]) -> list[list[str]]:
    """Return the names that differ only by what is easily overlooked, sorted."""
    by_key: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        by_key[_plain(name)].append(name)
    return [spellings for spellings in by_key.values() if len(spellings) > 1]


def _several_labels(names: Sequence[str]) -> list[str]:
    """Return the names that are several labels, of which one is another's: a|b beside b."""
    parts = {
        name: name.split()
        if _NUMBERS.fullmatch(name)
        else [_BESIDE.sub("", part) for part in _BETWEEN.split(name)]
        for name in names
    }
    alone = {labels[0] for labels in parts.values() if len(labels) == 1}
    return [
        name for name, labels in parts.items() if len(labels) > 1 and not alone.isdisjoint(labels)
    ]


def _with_unseen(labelled: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Return the classes of each split, those of its split S_unseen among them."""
    together: dict[str, Mapping[str, int]] = {}
    for split, by_class in labelled.items():
        base = split.removesuffix(UNSEEN)
        key = base if base in labelled else split
        together[key] = {**together.get(key, {}), **by_class}
    return together


def _near_names(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Name pairs that one slip of a letter makes equal, where each split has one of them only."""
    owners = _owners(counts)
    shortened: dict[str, list[str]] = defaultdict(list)  # with one letter omitted
    for name, splits in owners.items():
        plain = _plain(name)
        if len(splits) < len(counts):
            for variant in {plain, *(plain[:k] + plain[k + 1 :] for k in range(len(plain)))}:
                shortened[variant].append(name)
    pairs = set[tuple[str, str]]()
    for near in shortened.values():
        first, *others = sorted(near)
        for other in others:
            is_code = _without_digits(first) == _without_digits(other)  # 1001 beside 1002
            is_short = max(len(first), len(other)) < SHORTEST_NEAR  # bat beside cat
            if not is_code and not is_short and not owners[first] & owners[other]:
                pairs.add((first, other))
    some = [f"{_name(a)} and {_name(b)}" for a, b in sorted(pairs)[:MOST_NAMED]]
    return [f"classes of other splits whose names are near: {', '.join(some)}"] if some else []


def _without_digits(name: str) -> str:
    return "".join(letter for letter in name if not letter.isdigit())


def _plain(name: str) -> str:
    """Return a name without what is easily overlooked: case, blanks, form of accents, zeros."""
    plain = "".join(unicodedata.normalize("NFKC", name).casefold().split())
    number = _NUMBER.fullmatch(plain)
    return number[1] if number else plain


def _names(names: Iterable[str]) -> str:
    return listed([_name(name) for name in sorted(names)], MOST_NAMED)


def _name(name: str) -> str:
    """Return a name as a line of the report shows it: as it is where that is unmistakable."""
    short = name if len(name) <= 60 else f"{name[:28]}...{name[-28:]}"
    is_plain = short.isprintable() and short == short.strip() and short
    return short if is_plain else repr(short)
