"""`mace.tools.arg_parser`: the options of the readout, and a check of everything before the run starts."""

import sys
from functools import wraps


def apply(module):
    """Patch ``build_default_arg_parser``; ``--config`` files go through the same parser."""
    stock = module.build_default_arg_parser

    @wraps(stock)
    def build_default_arg_parser():
        parser = stock()
        add_options(parser)
        stock_parse = parser.parse_args

        def parse_args(*args, **kwargs):
            parsed = stock_parse(*args, **kwargs)
            from e2ip_plugins.errors import InputError
            from mace_ext.options import check_options

            try:
                check_options(parsed)
            except InputError as error:
                print(f"{parser.prog}: error: {error}", file=sys.stderr)
                raise SystemExit(2) from error
            return parsed

        parser.parse_args = parse_args
        return parser

    module.build_default_arg_parser = build_default_arg_parser


def add_options(parser):
    """``--readout`` and ``--e2ip_*``; all default to None, which is stock MACE."""
    group = parser.add_argument_group("e2ip", "force uncertainties (e2ip-plugins)")
    group.add_argument(
        "--readout", choices=["stock", "e2ip"], default=None, help="e2ip: every force gets a full 3x3 covariance"
    )
    group.add_argument("--e2ip_preset", default=None, help="settings of readout and loss: default or paper")
    group.add_argument("--e2ip_evidence", default=None, help="independent or coupled (default: the preset's)")
    group.add_argument(
        "--e2ip_evidence_weight", type=float, default=None, help="weight of the evidence regulariser, independent mode"
    )
    group.add_argument(
        "--e2ip_force_unit",
        default=None,
        help="force unit in eV/A, or auto: 0.03 of the training forces' component RMS (default: 1 kcal/mol/A)",
    )
