"""Read weights that others trained: a SOURCE in words -> a backbone, its view and a report.

`source` says what a SOURCE is, and fetches it from hubs; `files` reads tensors and never unpickles;
`layouts` knows how other programs name an encoder's tensors; `fit` puts them into a network, all or
none; `views` finds the mean, std and size that they were trained with. Start reading at `reader`;
who uses it calls `sslpipe.load_backbone(SOURCE)`.
"""
