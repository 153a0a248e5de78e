"""Figures of the paper (arXiv:2602.10419), in kcal/mol/Å, for its own networks, splits and lengths of training.

Its silica is a glass, whose frames are not ours, and it gives no unit there.
"""

from typing import Dict, Tuple

MAE, ES, COV, CE, NLL = "force_mae", "energy_score", "coverage95", "calibration_error", "nll"
RHO, COST = "spearman_epistemic", "cost"

#: (data set, test) -> method -> figures by their name in tables. Sections 5.1, 5.3 and 5.4.
PAPER: Dict[Tuple[str, str], Dict[str, Dict[str, float]]] = {
    ("water", "test"): {
        "DE, raw": {MAE: 0.386, ES: 0.64, COV: 0.255, CE: 0.380, NLL: 237.62},
        "DE, floor": {MAE: 0.386, ES: 0.67, COV: 0.931, CE: 0.256, NLL: 2.74},
        "MVE-DE, raw": {MAE: 0.492, ES: 0.73, COV: 0.970, CE: 0.139, NLL: 1.59},
        "SE, floor": {MAE: 0.517, ES: 0.93, COV: 0.790, CE: 0.134, NLL: 15.2},
        "eIP, raw": {MAE: 0.499, ES: 2.15, COV: 0.652, CE: 0.314, NLL: 3.13},
        "e²IP, raw": {MAE: 0.471, ES: 0.68, COV: 0.910, CE: 0.114, NLL: 1.31},
    },
    ("silica", "ood"): {
        "DE, raw": {MAE: 1.059, RHO: 0.790, COST: 0.242},
        "eIP, raw": {MAE: 1.622, RHO: 0.767, COST: 0.049},
        "e²IP, raw": {MAE: 1.559, RHO: 0.775, COST: 0.053},
    },
    ("aspirin", "test"): {
        "DE, floor": {MAE: 0.187, ES: 0.703, CE: 0.423, NLL: 3.30},
        "MVE-DE, raw": {MAE: 0.496, ES: 0.830, CE: 0.444, NLL: 3.35},
        "eIP, raw": {MAE: 0.299, ES: 0.453, CE: 0.110, NLL: 2.43},
        "e²IP, raw": {MAE: 0.272, ES: 0.395, CE: 0.079, NLL: 0.83},
    },
    ("azobenzene", "test"): {
        "DE, floor": {MAE: 0.139, ES: 0.341, CE: 0.327, NLL: 2.34},
        "MVE-DE, raw": {MAE: 0.640, ES: 1.238, CE: 0.472, NLL: 4.93},
        "eIP, raw": {MAE: 0.217, ES: 0.323, CE: 0.149, NLL: 0.35},
        "e²IP, raw": {MAE: 0.128, ES: 0.187, CE: 0.076, NLL: -1.47},
    },
}  # fmt: skip
