"""Show a run, or several side by side, as one HTML file that needs no network and no library.

For whoever trains: verdict, numbers with intervals, curves, views, maps, neighbours, confusions.
`run_files` reads a run directory and removes secrets and folders; `result_tables`, `compare` and
`embeddings` gather numbers and `charts` draws them; words and structure are in `templates`, which
`page` fills and where every text that comes from a file is escaped. Start reading at `run_page`.
"""
