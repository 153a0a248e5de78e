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
    """``--readout`` and ``--e2ip_*``; by default everything is stock MACE."""
    group = parser.add_argument_group("e2ip", "force uncertainties (e2ip-plugins)")
    group.add_argument(
        "--readout", choices=["stock", "e2ip"], default="stock", help="e2ip: every force gets a full 3x3 covariance"
    )
    # "%(default).0s" prints nothing and keeps MACE's formatter from adding "(default: None)".
    group.add_argument(
        "--e2ip_preset", help="settings of readout and loss: default (the default) or paper%(default).0s"
    )
    group.add_argument("--e2ip_evidence", help="independent or coupled (default: the preset's)%(default).0s")
    group.add_argument(
        "--e2ip_evidence_weight",
        type=float,
        help="weight of the evidence regulariser, independent mode (default: 0.01; preset paper: 0.1)%(default).0s",
    )
    group.add_argument(
        "--e2ip_force_unit",
        help="force unit in eV/A, or auto: 0.03 of the training forces' component RMS "
        "(default: 0.0433641, 1 kcal/mol/A)%(default).0s",
    )
