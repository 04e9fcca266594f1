"""Networks: backbones by name, the projector, SimCLR's and MoCo's arrangement of them.

For training, export and evaluation, which build the same network from the same recipe. Start with
`simclr.py`; `backbones.py` holds the table BACKBONES, `momentum.py` the momentum encoder,
`sync_batchnorm.py` BatchNorm over all ranks, `tuning.py` blocks, frozen or with rates of their own.
"""
