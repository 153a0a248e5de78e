"""An e²IP model that evaluates MACE alone; its readout runs when someone asks for the uncertainties."""

from typing import Any, Dict

import torch
from torch import Tensor

from mace_ext.observed_model import ObservedModel


class HostModel(ObservedModel):
    """Stand-in for an e²IP model in MACE's code: energy and forces to the last bit, and no readout until `read_out`.

    Of the last call it keeps what the readout reads, without a graph: features, positions and edges. A readout that
    takes forces has another evaluation of the model in place of that.
    """

    def __call__(self, batch: Dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        self._again = bool(self._model.e2ip_readout.takes_forces)
        # MACE puts positions with a graph into the batch.
        inputs = batch.copy() if self._again else batch
        output = self._model.host_forward(batch, *args, **kwargs)
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        self._inputs = {name: value.detach() if value.requires_grad else value for name, value in tensors.items()}
        # Callers may move their positions in place.
        self._inputs.update({name: self._inputs[name].clone() for name in ("positions", "cell")})
        self._features, self._arguments = output["node_feats"].detach(), (args, kwargs)
        return output

    def read_out(self) -> Dict[str, Tensor]:
        """Return what the model puts out for the last call, the readout's outputs among it."""
        if not self._again:
            return self._model.read_out(self._inputs, self._features)
        args, kwargs = self._arguments
        with torch.inference_mode(False), torch.enable_grad():
            return self._model(self._inputs.copy(), *args, **kwargs)
