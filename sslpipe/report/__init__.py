"""Show a run, or several side by side, as one HTML file that needs no network and no library.

For whoever trains: verdict, numbers with intervals, curves, views, maps, neighbours, confusions.
`run` reads a run directory and removes secrets and folders; `results`, `confusion`, `embeddings`
and `sections` make the sections' HTML; `charts` and `pictures` draw; `page` puts the file together.
Start reading at `sections`; every text that comes from a file is escaped where it enters.
"""
