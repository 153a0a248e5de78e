"""One module per seam of `mace_ext.seams`; each has ``apply(module)``. Imported while MACE is: no torch here."""
