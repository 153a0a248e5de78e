"""Stock NequIP models out of those with a readout, and the plugin of LAMMPS for compiled models."""
