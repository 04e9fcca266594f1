"""Frozen features in use: search, gallery, a map to browse, and which weights to choose.

For whoever has embedded images: `images.ImageSearch` finds the nearest ones, `gallery.Gallery` says
who is in a picture, `browse` draws a map, `choose` ranks weights before any training. Start at
`images.py`.
"""
