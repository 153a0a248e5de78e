"""Fine-tuning an e²IP model with ``--foundation_model``: its readout is kept where it means the same."""

import logging


def inherited_force_unit(foundation):
    """σ_ref in eV/Å of an e²IP foundation model, None for any other."""
    return foundation.e2ip_config["force_unit"] if hasattr(foundation, "e2ip_config") else None


def load_foundation_readout(model, foundation) -> None:
    """Copy the readout of an e²IP foundation model into every MACE head of ``model``.

    MACE has by then reduced the foundation model to one head. A readout of another preset, evidence mode
    or force unit means something else by the same weights: it is left out, and the log says so.
    """
    if not hasattr(foundation, "e2ip_head"):
        return
    differing = [key for key, value in model.e2ip_config.items() if foundation.e2ip_config.get(key) != value]
    if differing:
        logging.warning(f"e2ip readout of the foundation model not used, it differs in: {', '.join(differing)}")
        return
    source = foundation.e2ip_head
    for head in model.e2ip_head.heads:
        head.load_state_dict(source.heads[0].state_dict())
    if source.has_pool:
        model.e2ip_head.pool.load_state_dict(source.pool.state_dict())
    logging.info("e2ip readout taken over from the foundation model")
