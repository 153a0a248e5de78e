"""MACE adapter of e²IP. Imported at interpreter start by the import hook: standard library only."""
