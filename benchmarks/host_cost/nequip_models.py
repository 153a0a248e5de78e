"""NequIP's half: the steps that its training module and its ASE calculator take, as functions without arguments."""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from ase import Atoms
from hydra.utils import get_method
from nequip.data import AtomicDataDict, from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform, NonPeriodicCellTransform
from nequip.nn.compile import DictInputOutputWrapper
from nequip.scripts._compile_utils import COMPILE_TARGET_DICT
from nequip.train import EMALightningModule
from nequip.utils.aot import aot_export_model
from nequip.utils.global_state import set_global_state

from host_cost.measure import as_fitted
from host_cost.settings import Settings
from host_cost.systems import SPECIES, with_labels
from nequip_ext.model.readout import find_readout

warnings.filterwarnings("ignore", message=".*trainer.*reference is not registered")  # its steps log through a trainer

_COEFFS = {"total_energy": 1.0, "forces": 1.0}


class Host:
    """Models, data and steps of one system."""

    package = "nequip"

    def __init__(self, settings: Settings, frame: Atoms) -> None:
        set_global_state(allow_tf32=False)  # float64 as torch's default, as in every NequIP command
        self.settings = settings
        self.frames = [self._data(with_labels(frame, seed)) for seed in range(settings.frames)]

    @property
    def edges(self) -> int:
        return sum(AtomicDataDict.num_edges(data) for data in self.frames)

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

    def _config(self, variant: str, seed: int, **options) -> dict:
        inner = {
            "seed": seed,
            "model_dtype": self.settings.dtype,
            "type_names": list(SPECIES),
            "avg_num_neighbors": 50.0,
            "per_type_energy_scales": 1.0,
            "per_type_energy_shifts": 0.0,
            **self.settings.architecture,
            **options,
        }
        return {"_target_": "nequip_ext.E2IPModel", "seed": seed, "model": inner} if variant == "e2ip" else inner

    def _model(self, variant: str, seed: int) -> torch.nn.Module:
        config = self._config(variant, seed)
        model = get_method(config.pop("_target_"))(**config)
        if variant == "e2ip":
            as_fitted(find_readout(model))
        return model.to(self.settings.device).eval()

    def inference(self) -> dict[str, Callable[[], dict]]:
        """Variant -> function that predicts once: energies, forces, stress, and all uncertainty keys for e2ip."""
        data = self.frames[0] if len(self.frames) == 1 else AtomicDataDict.batched_from_list(self.frames)
        inputs = {k: v for k, v in data.items() if k not in ("forces", "total_energy")}
        if self.settings.mode == "aoti":
            baseline, e2ip = self._compiled("baseline", inputs), self._compiled("e2ip", inputs)
            # Loaded anew, the same file is as good as one with other weights.
            members = [self._compiled("baseline", inputs) for _ in self.settings.member_seeds]
        else:
            baseline, e2ip = self._model("baseline", 1), self._model("e2ip", 1)
            members = [self._model("baseline", seed) for seed in self.settings.member_seeds]
        self.parts = {"readout": e2ip}

        def predict(model: torch.nn.Module) -> dict:
            return {key: value.detach() for key, value in model(dict(inputs)).items()}

        def committee() -> dict:
            forces = torch.stack([predict(member)["forces"] for member in members])
            return {"forces": forces.mean(0), "forces_std": forces.std(0)}

        return {"baseline": lambda: predict(baseline), "e2ip": lambda: predict(e2ip), "committee": committee}

    def _compiled(self, variant: str, inputs: AtomicDataDict.Type) -> torch.nn.Module:
        """What ``nequip-compile --mode aotinductor --target ase`` or ``e2ip_ase`` makes, loaded."""
        target = COMPILE_TARGET_DICT["e2ip_ase" if variant == "e2ip" else "ase"]
        path = Path(self.settings.cache) / f"{variant}_{self.settings.size}_{self.settings.dtype}.nequip.pt2"
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

    def training(self) -> dict[str, Callable[[], None]]:
        """Variant -> function that does one step of NequIP's EMA training module, optimiser and averaging included."""
        batch = AtomicDataDict.batched_from_list(self.frames)
        modules = {variant: self._training_module(variant, 1) for variant in ("baseline", "e2ip")}
        members = [self._training_module("baseline", seed) for seed in self.settings.member_seeds]
        self.parts = {"readout": modules["e2ip"], "losses": [m.loss for m in modules.values()]}

        def stepper(module: EMALightningModule) -> Callable[[], None]:
            optimizer = module.configure_optimizers()

            def step() -> None:  # in the order of Lightning's automatic optimisation
                loss = module.training_step(batch, 0)
                optimizer.zero_grad()
                loss.backward()
                module.optimizer_step(0, 0, optimizer, lambda: loss)

            return step

        committee = [stepper(member) for member in members]
        steps = {variant: stepper(module) for variant, module in modules.items()}
        return {**steps, "committee": lambda: [step() for step in committee]}

    def _training_module(self, variant: str, seed: int) -> EMALightningModule:
        loss = "nequip_ext.E2IPLoss" if variant == "e2ip" else "nequip.train.EnergyForceLoss"
        module = EMALightningModule(
            model=self._config(variant, seed, compile_mode=self.settings.mode),
            num_datasets={"train": 1, "val": 0, "test": 0, "predict": 0},
            optimizer={"_target_": "torch.optim.Adam", "lr": 1e-4},
            loss={"_target_": loss, "per_atom_energy": True, "coeffs": dict(_COEFFS)},
            ema_decay=0.99,
        )
        return module.to(self.settings.device).train()
