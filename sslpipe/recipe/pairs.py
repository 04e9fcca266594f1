"""[pairs]: what the columns of a data set say of its samples, for the loss of a pretraining."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sslpipe.errors import shown
from sslpipe.recipe.base import Section

_UNIT_US = {"us": 1, "ms": 1_000, "s": 10**6, "min": 60 * 10**6, "h": 3600 * 10**6}
_UNIT_US["d"] = 24 * _UNIT_US["h"]
_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min|h|d)\s*")
ColumnName = Annotated[str, Field(min_length=1, max_length=200)]
Columns = tuple[ColumnName, ...]


class Pairs(Section):
    """What the columns of the data set say: who is a positive, who never a negative.

    A missing value knows nothing: it makes neither partners nor masks.
    """

    positive: Columns = ()
    """A column, or several: the second view is of a partner, another sample with the same value in
    all of them; and samples with the same values are no negatives of each other (with `within`,
    only where they are one image, or partners in the batch). A sample without a partner makes both
    views itself."""
    time: ColumnName | None = None
    """A column of times or numbers: partners are at most `within` apart in it."""
    within: Annotated[float, Field(ge=0, allow_inf_nan=False)] | str | None = None
    """How far apart partners are in `time`, at most: of a column of times a text with its unit (us,
    ms, s, min, h, d), "60 s" say, else a number."""
    different: Columns = ()
    """A column, or several, in each of which a sample's partner differs: what they explain is not
    what the embedding keeps."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the samples, drawn anew in each epoch, whose second view is of a partner; the others
    make both views themselves."""
    reach: Literal["split", "window"] = "split"
    """Where partners are looked for. split: in all of the split; one that lies outside of the
    window being read costs a read of its own, unless run.cache holds it. window: among the samples
    of the window that is being read (data.shuffle_window), which costs no read."""
    never_negative: Columns = ()
    """Columns: samples that share the value of any of them are no negatives of each other."""
    label: ColumnName | None = None
    """The column whose values are the labels that the loss sees (sup_con, mask_labels), instead of
    the data set's."""

    @field_validator("positive", "different", "never_negative", mode="before")
    @classmethod
    def _one_is_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("within")
    @classmethod
    def _known_unit(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, str) and _SPAN.fullmatch(value) is None:
            raise ValueError(f"{shown(value)} is no span of time; write one as '60 s' or '1.5 h'")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key in ("positive", "different", "never_negative"):
            names = getattr(self, key)
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ValueError(f"pairs.{key} names {twice[0]!r} twice; name each column once")
        if (self.time is None) != (self.within is None):
            raise ValueError(
                "pairs.time and pairs.within make a span of time together: give both, or neither"
            )
        if not self.has_partners:
            for key in ("different", "share", "reach"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"pairs.{key} is about partners, and pairs.positive names no column; give "
                        "positive, or time and within"
                    )
            if not self.never_negative and self.label is None:
                raise ValueError(
                    "pairs says nothing; give positive, never_negative or label, or leave the "
                    "section out"
                )
        both = sorted(set(self.positive) & set(self.different))
        if both:
            raise ValueError(
                f"pairs.different and pairs.positive both name {both[0]!r}: no partner differs in "
                "what it has in common"
            )
        return self

    @property
    def has_partners(self) -> bool:
        """Whether second views may be of other samples."""
        return bool(self.positive) or self.time is not None

    @property
    def masks(self) -> tuple[Columns, ...]:
        """Columns whose values count together: samples that share all of any are no negatives."""
        apart = [(name,) for name in self.never_negative]
        # near samples are partners, and who is near whom is no group
        together = [self.positive] if self.positive and self.time is None else []
        return tuple(dict.fromkeys([*together, *apart]))

    @property
    def within_us(self) -> int | None:
        """`within` in microseconds; None where it is a number without a unit, or not given."""
        if not isinstance(self.within, str):
            return None
        match = _SPAN.fullmatch(self.within)
        assert match is not None
        return round(float(match[1]) * _UNIT_US[match[2]])
