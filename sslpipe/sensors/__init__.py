"""Images as sensors give them, in shards: TIFF, DICOM, NIfTI, arrays and large scenes.

For whoever has images that are not 8-bit RGB pictures: `sslpipe sensors build` makes a data set of
C channels of uint8, uint16 or float32, which everything else reads as any other. `readers` says
what a file holds, by its header, and reads windows of it; `scenes` makes samples of files, and
`sensor_files` is both as a source of `build_dataset`. Start reading at `scenes.cut_scenes`.
"""
