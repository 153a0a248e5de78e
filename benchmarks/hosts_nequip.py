"""NequIP's half of `hosts.py`: steps of its training module and its ASE calculator, as functions without arguments."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts_models
import torch
from ase import Atoms
from hosts_models import SPECIES, Settings, as_fitted, with_labels
from hydra.utils import get_method
from nequip.data import AtomicDataDict, from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform, NonPeriodicCellTransform
from nequip.nn.compile import DictInputOutputWrapper
from nequip.scripts._compile_utils import COMPILE_TARGET_DICT
from nequip.train import EMALightningModule
from nequip.utils.aot import aot_export_model
from nequip.utils.global_state import set_global_state

from nequip_ext import E2IPCalculator
from nequip_ext.compat import NequIPCalculator
from nequip_ext.model.readout import find_readout

warnings.filterwarnings("ignore", message=".*trainer.*reference is not registered")  # its steps log through a trainer


class Host(hosts_models.Host):
    """Models, data and steps of one system."""

    package = "nequip"

    def __init__(self, settings: Settings, frame: Atoms) -> None:
        set_global_state(allow_tf32=False)  # float64 as torch's default, as in every NequIP command
        self.settings = settings
        data = [self._data(with_labels(frame, seed)) for seed in range(settings.frames)]
        self.batch = data[0] if len(data) == 1 else AtomicDataDict.batched_from_list(data)
        self.edges = AtomicDataDict.num_edges(self.batch)

    def _data(self, atoms: Atoms) -> AtomicDataDict.Type:
        # A box around molecules, as in the project's training configs: nequip-compile wants a stress.
        data = from_ase(atoms, key_mapping={"REF_energy": "total_energy", "REF_forces": "forces"})
        for transform in (
            ChemicalSpeciesToAtomTypeMapper(list(SPECIES), {s: s for s in SPECIES}),
            NonPeriodicCellTransform(padding=10.0, override_cell=True),
            NeighborListTransform(r_max=self.settings.architecture["r_max"]),
        ):
            data = transform(data)
        return AtomicDataDict.to_(data, torch.device(self.settings.device))

    def _config(self, variant: str, seed: int, **options: str) -> dict[str, Any]:
        inner = {"seed": seed, "model_dtype": "float32", "type_names": list(SPECIES), "avg_num_neighbors": 50.0}
        inner |= {"per_type_energy_scales": 1.0, "per_type_energy_shifts": 0.0}
        inner |= self.settings.architecture | options
        return {"_target_": "nequip_ext.E2IPModel", "seed": seed, "model": inner} if variant == "e2ip" else inner

    def _model(self, variant: str, seed: int) -> torch.nn.Module:
        config = self._config(variant, seed)
        model = get_method(config.pop("_target_"))(**config)
        if variant == "e2ip":
            as_fitted(find_readout(model))
        return model.to(self.settings.device).eval()

    def calculator(self, variant: str, **options: Any) -> NequIPCalculator:
        """Return an ``E2IPCalculator``, of the baseline a ``NequIPCalculator``."""
        types = ChemicalSpeciesToAtomTypeMapper(list(SPECIES), {s: s for s in SPECIES})
        transforms = [types, NeighborListTransform(r_max=self.settings.architecture["r_max"])]
        kind = E2IPCalculator if variant == "e2ip" else NequIPCalculator
        return kind(self._model(variant, 1), self.settings.device, transforms=transforms, **options)

    def predictor(self, variant: str, seed: int) -> Callable[[], dict[str, torch.Tensor]]:
        """Return what NequIP's calculator evaluates, eager or exported."""
        inputs = {k: v for k, v in self.batch.items() if k not in ("forces", "total_energy")}
        model = self._exported(variant, inputs) if self.settings.mode == "aoti" else self._model(variant, seed)
        return lambda: {key: value.detach() for key, value in model(dict(inputs)).items()}

    def _exported(self, variant: str, inputs: AtomicDataDict.Type) -> torch.nn.Module:
        """Return what ``nequip-compile --mode aotinductor --target ase`` or ``e2ip_ase`` makes, loaded.

        Loaded anew, the same file is as good as one with other weights.
        """
        target = COMPILE_TARGET_DICT["e2ip_ase" if variant == "e2ip" else "ase"]
        path = Path(self.settings.cache) / f"{variant}_{self.settings.size}.nequip.pt2"
        if not path.exists():
            sizes = {name: torch.export.Dim(name, min=2) for name in ("node", "edge")}
            aot_export_model(
                model=self._model(variant, 1),
                device=self.settings.device,
                input_fields=target["input"],
                output_fields=target["output"],
                data=target["data_settings"](dict(inputs)),
                batch_map=target["batch_map_settings"]({"graph": None, **sizes}),
                output_path=str(path),
            )
        package = torch._inductor.aoti_load_package(str(path))
        return DictInputOutputWrapper(package, target["input"], target["output"])

    def stepper(self, variant: str, seed: int) -> Callable[[], None]:
        """Return a step of NequIP's EMA training module, optimiser and averaging included."""
        loss = "nequip_ext.E2IPLoss" if variant == "e2ip" else "nequip.train.EnergyForceLoss"
        coeffs = {"total_energy": 1.0, "forces": 1.0}
        module = EMALightningModule(
            model=self._config(variant, seed, compile_mode=self.settings.mode),
            num_datasets={"train": 1, "val": 0, "test": 0, "predict": 0},
            optimizer={"_target_": "torch.optim.Adam", "lr": 1e-4},
            loss={"_target_": loss, "per_atom_energy": True, "coeffs": coeffs},
            ema_decay=0.99,
        ).to(self.settings.device)
        module.train()
        optimizer = module.configure_optimizers()
        batch = self.batch if self.settings.frames > 1 else AtomicDataDict.batched_from_list([self.batch])

        def step() -> None:  # in the order of Lightning's automatic optimisation
            loss = module.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            module.optimizer_step(0, 0, optimizer, lambda: loss)

        return step
