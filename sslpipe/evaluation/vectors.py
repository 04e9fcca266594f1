"""Features as people have them, opened in one place: a file, arrays, or a result of `embed`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sslpipe.data.index import DatasetIndex, Split, load_index, name_of_class
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.array_rows import embeddings_from_arrays
from sslpipe.evaluation.embed import Embeddings, SplitEmbeddings, check_embeddings
from sslpipe.evaluation.feature_files import CLASSES, NAMES, load_embeddings


class Features(NamedTuple):
    """Rows, what their file says of them, and their split; None of vectors alone."""

    rows: Embeddings
    facts: dict[str, Any]
    split: Split | None = None

    @property
    def split_name(self) -> str | None:
        """Return the name of the split; None where none is known."""
        name = self.facts.get("split")
        return None if name is None else str(name)

    def of_split(self) -> str:
        """Return " of SPLIT", for sentences; "" where none is known."""
        return "" if self.split_name is None else f" of {self.split_name}"

    def class_name(self, label: int) -> str | None:
        """Name a label, by its number where no name is known; None for none."""
        if self.split is not None:
            return self.split.class_name(label)
        return name_of_class(self.facts.get(CLASSES, []), label)

    def sample_name(self, sample: int) -> str:
        """Name a row of vectors alone by its id, a text where the file has texts."""
        names = self.facts.get(NAMES)
        return str(sample) if names is None else names[sample]


# a file (.safetensors, .npz, .npy), (N, F) floats, a result of `embed`, or what is opened already
Vectors = str | Path | ArrayLike | Tensor | Embeddings | Features


def open_features(features: Vectors, data: DatasetIndex | str | Path | None = None) -> Features:
    """Open features, and the split that they are of where `data` is given.

    Args:
        features: What `Vectors` says; those in memory are not copied where they are float32.
        data: The data set that a file, or a result of `embed`, was embedded from.

    Raises:
        UserError: They are none of these, not finite, or of another data set.
    """
    if isinstance(features, Features):
        return features
    if isinstance(features, str | Path):
        rows, facts = load_embeddings(features)
        if data is None:
            return Features(rows, facts)
        return _of_split(str(features), Features(rows, facts), load_index(data))
    facts = dict(features.facts) if isinstance(features, SplitEmbeddings) else {}
    if data is not None and not facts:
        raise UserError(
            "features in memory do not say of which split of the data set they are; give what "
            "sslpipe.embed returns of the split, the file that `sslpipe embed` wrote, or no data"
        )
    if not isinstance(features, Embeddings):
        features = embeddings_from_arrays(features, None, "")
    check_embeddings(features, "features", labelled=False)
    opened = Features(features.to("cpu"), facts)
    return opened if data is None else _of_split("features", opened, load_index(data))


def alike(opened: Sequence[Features], names: Sequence[str]) -> list[Features]:
    """Number classes, and samples, that have names in the files alike in all of them.

    Raises:
        DataError: One file has names where another has numbers that may mean other classes.
    """
    together = list(opened)
    for key, column in ((CLASSES, "labels"), (NAMES, "ids")):
        lists = {
            name: each.facts[key]
            for name, each in zip(names, opened, strict=True)
            if key in each.facts
        }
        texts = list(dict.fromkeys(text for listed in lists.values() for text in listed))
        if any(listed != texts for listed in lists.values()) and key == CLASSES:
            texts = sorted(texts)
        number = {text: place for place, text in enumerate(texts)}
        for place, each in enumerate(together):
            if key in each.facts:
                values = _numbered(getattr(each.rows, column), each.facts[key], number)
                rows = each.rows._replace(**{column: values})
                together[place] = each._replace(rows=rows, facts={**each.facts, key: texts})
            elif lists and (key == NAMES or not _has_same_numbers(each, opened)):
                raise DataError(
                    f"{column} of {next(iter(lists))} have names and those of {names[place]} are "
                    "numbers, which may mean others; save them alike in all files"
                )
    return together


def _has_same_numbers(one: Features, others: Sequence[Features]) -> bool:
    """Return whether labels without names can be numbers of the classes that others name.

    As of a file that an earlier version wrote, or of tars that were indexed without --classes.
    """
    if one.split is not None or not bool((one.rows.labels >= 0).any()):
        return True  # its data set names them; or there are none
    named = [each.facts for each in others if CLASSES in each.facts]
    classes = named[0][CLASSES]
    data = [facts.get("data_sha256") for facts in named]
    if None in data or any(facts[CLASSES] != classes for facts in named):
        return False  # numbers of texts mean nothing outside of their file
    return one.facts.get("data_sha256") in data or int(one.rows.labels.max()) < len(classes)


def _numbered(values: Tensor, texts: Sequence[str], number: dict[str, int]) -> Tensor:
    """Replace numbers of texts, -1 for none, by those of the same texts in another list."""
    places = torch.tensor([*(number[text] for text in texts), -1])  # -1 is the last
    return places[values]


def _of_split(path: str, opened: Features, index: DatasetIndex) -> Features:
    """Add the split that a features file, or rows in memory, were embedded from.

    Raises:
        DataError: The data set is another one, or the ids are no different samples of it.
    """
    rows, facts, _ = opened
    data = index.folder
    if NAMES in facts:
        raise DataError(
            f"{path}: ids are texts, and those of a data set's samples are integers: leave them "
            "out, and a row's id is its place"
        )
    if "split" not in facts:
        raise DataError(
            f"{path} does not say which split of {data} its rows are: write it with `sslpipe "
            'embed`, or as np.savez(FILE, features=..., ids=..., split="test")'
        )
    if "data_sha256" in facts and not index.has_sha256(facts["data_sha256"]):
        raise DataError(
            f"{path} was not embedded from {data} as it is now (sha256 "
            f"{str(facts.get('data_sha256'))[:12]} and {index.sha256[:12]}), so its ids are not "
            "known to be that data set's; embed the split again"
        )
    split = index.split(facts["split"])
    least = int(rows.ids.min())
    most = int(rows.ids.max())
    if least < 0 or most >= len(split):
        raise DataError(
            f"{path} has an id {least if least < 0 else most}, and split {split.name!r} of {data} "
            f"has {len(split)} samples; embed it again"
        )
    ids = rows.ids.sort().values
    twice = ids[1:][ids[1:] == ids[:-1]]
    if len(twice):
        raise DataError(f"{path} has the id {int(twice[0])} twice; embed it again")
    if CLASSES in facts:
        facts = dict(facts)
        texts = facts.pop(CLASSES)
        number = {name: place for place, name in enumerate(index.manifest.classes)}
        unknown = [text for text in texts if text not in number]
        if unknown:
            raise DataError(
                f"{path} has the label {unknown[0]!r}, which is no class of {data}; write the "
                "names of its classes, or leave the labels out"
            )
        rows = rows._replace(labels=_numbered(rows.labels, texts, number))
    return Features(rows, facts, split)
