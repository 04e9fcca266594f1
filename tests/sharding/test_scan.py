"""Tar headers that lie about sizes, names and extensions end in one line, at once."""

import pytest

from sslpipe.data.decode import BadSample
from sslpipe.data.reader import _alone, _plain
from sslpipe.errors import DataError
from sslpipe.sharding.scan import scan_tar

pytestmark = pytest.mark.timeout(60)  # a loop without end
END = bytes(10240)


def header(name=b"a.png", size=b"00000000003\0", kind=b"0", magic=b"ustar\x0000") -> bytes:
    """A ustar header with a right checksum, field by field as POSIX.1-1988 has them."""
    raw = bytearray(512)
    for start, field in ((0, name), (100, b"0000644\0"), (124, size), (156, kind), (257, magic)):
        raw[start : start + len(field)] = field
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def binary(number: int) -> bytes:
    """GNU's sizes beyond octal: base 256, the highest bit set; negative in two's complement."""
    return (number + (0 if number < 0 else 2**95) + (2**96 if number < 0 else 0)).to_bytes(
        12, "big"
    )


def record(key: bytes, value: bytes) -> bytes:
    """A pax record, its own length in front."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest) + len(str(len(rest)))))
    return str(length).encode() + rest


def pax(*records: bytes, size: bytes | None = None) -> bytes:
    body = b"".join(records)
    return header(b"pax", size or b"%011o\0" % len(body), b"x") + padded(body)


GOOD = header() + padded(b"abc")
LONG_NAME = header(b"././@LongLink", b"%011o\0" % 4, b"L") + padded(b"a.p\0")
HOSTILE = {
    "size 2^62": header(size=binary(2**62)) + END,
    "size 2^63": header(size=binary(2**63)) + END,
    "size 2^87": header(size=binary(2**87)) + END,
    "size -512": header(size=binary(-512)) + padded(b"abc") + END,
    "size -2^63": header(size=binary(-(2**63))) + END,
    "octal -512": header(b"a.cls", b"-0000001000\0") + padded(b"abc") + END,
    "largest octal": header(size=b"77777777777\0") + padded(b"abc") + END,
    "a name of 2^62 bytes": header(b"././@LongLink", binary(2**62), b"L") + GOOD + END,
    "a name of -512 bytes": header(b"././@LongLink", binary(-512), b"L") + GOOD + END,
    "5,000 long names": LONG_NAME * 5000 + GOOD + END,
    "5,000 pax headers": pax(record(b"path", b"b.png")) * 5000 + GOOD + END,
    "pax size -1024": pax(record(b"size", b"-1024")) + GOOD + END,
    "pax size -1536": pax(record(b"size", b"-1536")) + GOOD + END,
    "pax size 2^70": pax(record(b"size", str(2**70).encode())) + GOOD + END,
    "pax of 2^62 bytes": pax(record(b"path", b"b.png"), size=binary(2**62)) + GOOD + END,
    "a pax length of 6,000 digits": pax(b"9" * 6000 + b" path=x\n") + GOOD + END,
    "a pax length of 0": pax(b"0 path=x\n") + GOOD + END,
    "a sparse map of letters": pax(record(b"GNU.sparse.map", b"0,1,x")) + GOOD + END,
    "a name of 400,000 letters": pax(record(b"path", b"a/" * 200_000 + b"b")) + GOOD + END,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_one_line_that_names_the_tar(name, tmp_path):
    path = tmp_path / "t.tar"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(DataError, match=r"t\.tar") as caught:
        scan_tar(path)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_reader_takes_no_image_out_of_a_hostile_member(name):
    raw = HOSTILE[name][: -len(END)]
    assert _plain(memoryview(raw), 0, len(raw)) is None
    sample = _alone(raw)
    assert isinstance(sample.image, BadSample) or bytes(sample.image) in (b"", b"abc")
