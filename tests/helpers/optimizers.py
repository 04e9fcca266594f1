"""An optimizer over a model's trainable parameters, as a plan builds it."""

from sslpipe.optim.parameter_groups import parameter_groups


def build_optimizer(model, optim, lr_scale=lambda name: 1.0, *, pretrained=None):
    groups = parameter_groups(model, optim, lr_scale, pretrained=pretrained)
    return optim.build(groups=groups)
