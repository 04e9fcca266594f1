"""Arguments of the gallery: a wrong type is one line before anything is done."""

import pytest

import sslpipe
from sslpipe.errors import UserError


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sslpipe.Gallery("4"), "dim = '4' .* whole number"),
        (lambda: sslpipe.Gallery(4).remove(5), "name = 5 .* a text"),
        (lambda: sslpipe.Gallery(4).embeddings(["Ada"]), r"name = \['Ada'\] .* a text"),
        (lambda: sslpipe.Gallery(4).save(5), "path = 5 .* a path"),
        (lambda: sslpipe.Gallery.load(5), "path = 5 .* a path"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_is_taken(call, words):
    with pytest.raises(UserError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)
