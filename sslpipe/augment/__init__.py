"""Augmentation: a batch of images becomes two float views of each image.

For training (FusedViews), for checking it (KorniaViews, the same by kornia) and for notebooks
(TwoViews). All randomness is a function of (seed, epoch, sample id, view); no generator is touched.
Start with ops.py: the list OPS says what is done, in which order, and `draws` makes the numbers; to
add an augmentation, write one more Op; sensor_ops.py has those of images without an up or colours.
presets.py has the published settings, two_views.py makes views. FusedViews' plan, made in the
loader's thread, is that of chunks.py, or on a GPU that of triton_views.py, with the kernels of
triton_kernels.py.
"""
