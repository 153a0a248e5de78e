"""Reports on prediction files that MACE's and NequIP's tools wrote: comparison, ensembles, tables and figures."""
