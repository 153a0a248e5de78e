"""i-PI's ``BatchedMACE``, a ``MACECalculator`` that calls models itself and passes on what they put out.

It ends the run where an output is neither named under ``ase_like_properties`` nor ignored (docs/howto/other-tools.md).
"""

from typing import Any

from e2ip_plugins.errors import InputError
from e2ip_plugins.keys import FRAME_OUTPUTS
from e2ip_plugins.predictions.columns import uncertainties


def prepare_batched(calculator: Any) -> None:
    """Let i-PI ignore the uncertainties that the user did not name under ``ase_like_properties``.

    Parameters
    ----------
    calculator : BatchedMACE

    Raises
    ------
    InputError
        For a calibration, which i-PI would not apply, and for uncertainties of a committee, which i-PI would average.
    """
    ours = {*uncertainties(), *(key.name for key in FRAME_OUTPUTS)}
    wanted = sorted(ours & set(calculator.ase_like_properties))
    if calculator._uq_calibration is not None:
        raise InputError(
            f"{calculator._uq_calibration.path}: i-PI takes the outputs of the model as they are and applies no "
            "calibration; leave it out of mace_kwargs"
        )
    if wanted and calculator.num_models > 1:
        raise InputError(
            f"ase_like_properties: {', '.join(wanted)}: i-PI averages the outputs of the {calculator.num_models} "
            "models of a committee, which is not their mixture's uncertainty; leave them out, or use one model"
        )
    instructions = calculator.instructions
    unwanted = ours - set(wanted)
    instructions["ignore"] = sorted({*instructions.get("ignore", ()), *unwanted})
