"""`mace.cli.eval_configs`: uncertainty columns in the output of `mace_eval_configs`."""


def apply(module):
    """Patch ``parse_args``, ``run``, ``main`` and what calls the model."""
    from mace_ext.evaluate import patch_eval_configs

    patch_eval_configs(module)
