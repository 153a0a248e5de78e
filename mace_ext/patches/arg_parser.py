"""`mace.tools.arg_parser`: the options of the readout, and a check of everything before the run starts."""

import sys

from e2ip_plugins.errors import InputError
from mace_ext.patches import wrap
from mace_ext.training.checks import check_options
from mace_ext.training.options import add_options


def apply(module):
    """Patch ``build_default_arg_parser``; ``--config`` files go through the same parser."""
    wrap(module, build_default_arg_parser=build_default_arg_parser)


def build_default_arg_parser(stock):
    """Return the stock parser with our options, which it checks after parsing."""
    parser = stock()
    add_options(parser)
    stock_parse = parser.parse_args

    def parse_args(*args, **kwargs):
        parsed = stock_parse(*args, **kwargs)
        try:
            check_options(parsed)
        except InputError as error:
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
            raise SystemExit(2) from error
        return parsed

    parser.parse_args = parse_args
    return parser
