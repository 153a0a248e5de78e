"""Parts of ``benchmarks/hosts.py``: systems, models of both hosts, measurements and the report."""
