"""Hand a trained backbone over: written in the formats of others, proved equal, loaded in one line.

`load` reads an export or a run directory, for anyone with images to embed; `write` writes formats,
each loaded again in a clean process (`verify`); `model_card` writes what people read. Start reading
at `load.load_backbone`; a format of one's own is an entry in `formats.FORMATS` and one in
`verify.READERS`. Nothing is imported here: `verify` reads most formats without this package.
"""
